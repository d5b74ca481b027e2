# CUDA where nvcc is present: sm_90a, C++20.
option(SWITCHYARD_CUDA "Build the GPU engine where nvcc is present" ON)
set(SWITCHYARD_HAS_CUDA OFF)
if(SWITCHYARD_CUDA)
  include(CheckLanguage)
  check_language(CUDA)
endif()
if(SWITCHYARD_CUDA AND CMAKE_CUDA_COMPILER AND NOT SWITCHYARD_SANITIZE)
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
