# Finds oneDNN by its header and its library, and defines the target oneDNN::oneDNN.
#
# Not by oneDNN's own package file: where the library was built with OpenCL, as Debian 12's is, that file demands the
# headers of OpenCL, which nothing here includes.
#
# Inputs: oneDNN_ROOT, CMAKE_PREFIX_PATH. Results: oneDNN_FOUND, oneDNN_VERSION.
find_path(oneDNN_INCLUDE_DIR oneapi/dnnl/dnnl.hpp)
find_library(oneDNN_LIBRARY dnnl)
mark_as_advanced(oneDNN_INCLUDE_DIR oneDNN_LIBRARY)

set(oneDNN_VERSION "")
set(oneDNN_problem "")
if(oneDNN_INCLUDE_DIR)
  set(oneDNN_headers ${oneDNN_INCLUDE_DIR}/oneapi/dnnl)
  foreach(part IN ITEMS MAJOR MINOR PATCH)
    file(STRINGS ${oneDNN_headers}/dnnl_version.h line REGEX "^#define DNNL_VERSION_${part} [0-9]+")
    string(REGEX MATCH "[0-9]+$" number "${line}")
    list(APPEND oneDNN_VERSION "${number}")
  endforeach()
  list(JOIN oneDNN_VERSION "." oneDNN_VERSION)
  # The engine gives each of its threads one thread of oneDNN, through the OpenMP runtime.
  file(STRINGS ${oneDNN_headers}/dnnl_config.h line REGEX "^#define DNNL_CPU_THREADING_RUNTIME ")
  if(NOT line MATCHES "DNNL_RUNTIME_OMP$")
    string(REGEX REPLACE ".* " "" line "${line}")
    set(oneDNN_problem "The one in ${oneDNN_headers} was built for ${line}, not for OpenMP (DNNL_RUNTIME_OMP).")
    set(oneDNN_LIBRARY_usable NO)
  else()
    set(oneDNN_LIBRARY_usable YES)
  endif()
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(oneDNN
  REQUIRED_VARS oneDNN_LIBRARY oneDNN_INCLUDE_DIR oneDNN_LIBRARY_usable
  VERSION_VAR oneDNN_VERSION
  REASON_FAILURE_MESSAGE "${oneDNN_problem}")

if(oneDNN_FOUND AND NOT TARGET oneDNN::oneDNN)
  add_library(oneDNN::oneDNN UNKNOWN IMPORTED)
  set_target_properties(oneDNN::oneDNN PROPERTIES
    IMPORTED_LOCATION ${oneDNN_LIBRARY}
    INTERFACE_INCLUDE_DIRECTORIES ${oneDNN_INCLUDE_DIR})
endif()
