# Half of a file's compile time, with precompiled headers too, is templates that its neighbours have as well. With
# SWITCHYARD_UNITY, up to ten files of a room are compiled as one. Off by default: who changes one file then compiles
# ten. If it is TESTS, tests alone are compiled so, which tests/CMakeLists.txt sees to.
if(NOT SWITCHYARD_UNITY)
  return()
endif()
find_package(Python3 REQUIRED COMPONENTS Interpreter)

# switchyard_compile_together(TARGET): files with options of their own, and those of CUDA, stay alone.
function(switchyard_compile_together target)
  get_target_property(directory ${target} SOURCE_DIR)
  get_target_property(listed ${target} SOURCES)
  set(sources)
  foreach(source IN LISTS listed)
    if(source MATCHES "\\.cpp$")
      cmake_path(ABSOLUTE_PATH source BASE_DIRECTORY ${directory})
      list(APPEND sources ${source})
    endif()
  endforeach()
  execute_process(COMMAND ${Python3_EXECUTABLE} ${PROJECT_SOURCE_DIR}/cmake/together.py 10 ${sources}
                  OUTPUT_VARIABLE groups OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
  foreach(source group IN ZIP_LISTS sources groups)
    set_source_files_properties(${source} TARGET_DIRECTORY ${target} PROPERTIES UNITY_GROUP ${group})
  endforeach()
endfunction()

if(NOT SWITCHYARD_UNITY STREQUAL "TESTS")
  foreach(target IN ITEMS switchyard switchyard_c switchyard_lab switchyard_all_to_all)
    if(TARGET ${target})
      switchyard_compile_together(${target})
    endif()
  endforeach()
endif()
