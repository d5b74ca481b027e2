# CUDA: sm_90a, C++20. Its kernels take some 25 minutes of processor time to compile, so a machine
# without a GPU compiles them only where that is asked for.
set(SWITCHYARD_CUDA "AUTO" CACHE STRING
    "The GPU engine: ON (needs nvcc), OFF, or AUTO: where there are nvcc and an NVIDIA GPU")
set_property(CACHE SWITCHYARD_CUDA PROPERTY STRINGS AUTO ON OFF)
option(SWITCHYARD_BLACKWELL "Also compile and disassemble a kernel for sm_100a: never run" OFF)
set(SWITCHYARD_HAS_CUDA OFF)
set(wants_cuda ${SWITCHYARD_CUDA})
# For the command, which tells it to who asks for the engine.
set(SWITCHYARD_WHY_NO_CUDA "")
if(NOT SWITCHYARD_CUDA)
  set(SWITCHYARD_WHY_NO_CUDA "was configured with -DSWITCHYARD_CUDA=OFF")
endif()
if(SWITCHYARD_CUDA STREQUAL "AUTO")
  # The driver's device, which is there in containers, too.
  if(EXISTS /dev/nvidiactl OR EXISTS /dev/dxg)
    set(wants_cuda ON)
  else()
    set(wants_cuda OFF)
    set(SWITCHYARD_WHY_NO_CUDA "was configured where no NVIDIA GPU was seen; configure it with -DSWITCHYARD_CUDA=ON")
  endif()
endif()
if(wants_cuda)
  include(CheckLanguage)
  check_language(CUDA)
  if(SWITCHYARD_CUDA STREQUAL "AUTO" AND NOT CMAKE_CUDA_COMPILER)
    set(SWITCHYARD_WHY_NO_CUDA "was configured where there was no nvcc; install the CUDA toolkit and configure it anew")
    message(STATUS "An NVIDIA GPU is here, but no nvcc: building without the GPU engine. Install the "
                   "CUDA toolkit (12.3 or later), or set CMAKE_CUDA_COMPILER.")
  elseif(NOT CMAKE_CUDA_COMPILER)
    message(FATAL_ERROR "SWITCHYARD_CUDA is ${SWITCHYARD_CUDA}, but there is no nvcc; install the "
                        "CUDA toolkit (12.3 or later), set CMAKE_CUDA_COMPILER, or leave it AUTO")
  endif()
endif()
if(SWITCHYARD_SANITIZE)
  set(SWITCHYARD_WHY_NO_CUDA "was configured with -DSWITCHYARD_SANITIZE=${SWITCHYARD_SANITIZE}")
endif()
if(wants_cuda AND CMAKE_CUDA_COMPILER AND NOT SWITCHYARD_SANITIZE)
  # -real: no PTX, which no other architecture could be compiled from.
  set(CMAKE_CUDA_ARCHITECTURES 90a-real)
  enable_language(CUDA)
  # CMake 3.25 (Debian 12) does not know that nvcc 12 and later take this flag.
  if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
    set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
    set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
  endif()
  set(SWITCHYARD_HAS_CUDA ON)
endif()
