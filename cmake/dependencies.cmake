# Looks for the build's needs before anything else. All that is missing is named at once, with the command that
# installs it.
set(SWITCHYARD_BUILD_TESTS AUTO CACHE STRING "The tests: ON, OFF, or AUTO: where GoogleTest is installed")
set(SWITCHYARD_BUILD_BENCH AUTO CACHE STRING
    "The benchmarks of bench/: ON, OFF, or AUTO: where Google Benchmark is installed")
set_property(CACHE SWITCHYARD_BUILD_TESTS SWITCHYARD_BUILD_BENCH PROPERTY STRINGS AUTO ON OFF)

list(PREPEND CMAKE_MODULE_PATH ${PROJECT_SOURCE_DIR}/cmake)
set(missing "")

# switchyard_need(PACKAGE WHAT ARGUMENTS...): find_package(PACKAGE ARGUMENTS...)
macro(switchyard_need package what)
  find_package(${package} ${ARGN} QUIET)
  if(NOT ${package}_FOUND)
    list(APPEND missing "${what}")
  endif()
endmacro()

include(CheckLanguage)
check_language(CXX)
if(CMAKE_CXX_COMPILER)
  enable_language(CXX)
  switchyard_need(Threads "POSIX threads")
  switchyard_need(oneDNN "oneDNN 2.6 or later, built for OpenMP" 2.6 MODULE)
  switchyard_need(nlohmann_json "nlohmann-json 3.11 or later" 3.11)
  switchyard_need(fmt "fmt 9 or later" 9)
  switchyard_need(Eigen3 "Eigen 3.3 or later" 3.3 NO_MODULE)
  if(SWITCHYARD_BUILD_CLI)
    switchyard_need(CLI11 "CLI11 2.1 or later, for the command (or set SWITCHYARD_BUILD_CLI to OFF)" 2.1)
  endif()
  # Tests and benchmarks are for who works on Switchyard: a plain configure builds those whose library is there.
  foreach(part IN ITEMS "TESTS GTest 1.12 GoogleTest" "BENCH benchmark 1.7 Google_Benchmark")
    separate_arguments(part)
    list(GET part 0 option)
    list(GET part 1 package)
    list(GET part 2 version)
    list(GET part 3 library)
    string(REPLACE "_" " " library ${library})
    set(option SWITCHYARD_BUILD_${option})
    if(${option} STREQUAL "AUTO")
      set(${option} ${PROJECT_IS_TOP_LEVEL})
      if(PROJECT_IS_TOP_LEVEL)
        find_package(${package} ${version} QUIET)
        if(NOT ${package}_FOUND)
          set(${option} OFF)
          message(STATUS "Switchyard: ${library} ${version} is not installed, so ${option} is OFF "
                         "(scripts/bootstrap.sh test installs it)")
        endif()
      endif()
    elseif(${option})
      switchyard_need(${package} "${library} ${version} or later (or set ${option} to OFF)" ${version})
    endif()
  endforeach()
else()
  list(APPEND missing "a C++20 compiler (libraries are looked for when there is one)")
endif()

if(missing)
  list(TRANSFORM missing PREPEND "  - ")
  list(JOIN missing "\n" missing)
  file(STRINGS ${PROJECT_SOURCE_DIR}/cmake/packages.txt packages REGEX "^build ")
  list(TRANSFORM packages REPLACE "^build ([^ ]+).*" "\\1")
  list(JOIN packages " " packages)
  message(FATAL_ERROR
    "Switchyard cannot be built here yet. Missing:\n${missing}\n"
    "On Debian and Ubuntu, this installs all that it is built with:\n"
    "  scripts/bootstrap.sh build\n"
    "which is\n"
    "  apt-get install --no-install-recommends ${packages}\n"
    "Elsewhere, docs/dependencies.md says what each library is for, and CMAKE_PREFIX_PATH where to look.")
endif()
