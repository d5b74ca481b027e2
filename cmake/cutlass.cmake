# The CUTLASS headers that the kernels are written with. scripts/bootstrap.sh puts the pinned version
# where this looks.
set(SWITCHYARD_CUTLASS_INCLUDE "" CACHE PATH
    "Directory with cute/ and cutlass/ (default: what scripts/bootstrap.sh fetched)")
set(SWITCHYARD_HAS_GPU OFF)
if(SWITCHYARD_HAS_CUDA)
  if(NOT SWITCHYARD_CUTLASS_INCLUDE)
    set(SWITCHYARD_CUTLASS_INCLUDE
        ${PROJECT_SOURCE_DIR}/.cache/cutlass/4.2.0.0/cutlass_library/source/include)
  endif()
  if(EXISTS ${SWITCHYARD_CUTLASS_INCLUDE}/cutlass/version.h)
    find_package(CUDAToolkit 12.3 REQUIRED)
    set(SWITCHYARD_HAS_GPU ON)
  else()
    # Not a warning, which pip would hide: the package would have no engine for the GPU that is here.
    message(FATAL_ERROR
      "nvcc is here, but the CUTLASS headers are not in ${SWITCHYARD_CUTLASS_INCLUDE}. Run "
      "'scripts/bootstrap.sh cuda' to fetch them, set SWITCHYARD_CUTLASS_INCLUDE to a copy of version 4.2 or "
      "later, or set SWITCHYARD_CUDA to OFF to build without the GPU engine.")
  endif()
endif()
