# More than half of a build's processor time is reading the headers that nearly every file includes.
# With SWITCHYARD_PRECOMPILED_HEADERS, they are read once; if it is TESTS, by tests alone, which
# tests/CMakeLists.txt sees to. Off by default, because a file then compiles without the includes that
# it needs, and because compiler caches do not know such files by default.
if(NOT SWITCHYARD_PRECOMPILED_HEADERS OR SWITCHYARD_PRECOMPILED_HEADERS STREQUAL "TESTS")
  return()
endif()
target_precompile_headers(switchyard PRIVATE
  $<$<COMPILE_LANGUAGE:CXX>:<fmt/core.h$<ANGLE-R>>
  $<$<COMPILE_LANGUAGE:CXX>:<algorithm$<ANGLE-R>>
  $<$<COMPILE_LANGUAGE:CXX>:<atomic$<ANGLE-R>>
  $<$<COMPILE_LANGUAGE:CXX>:<chrono$<ANGLE-R>>
  $<$<COMPILE_LANGUAGE:CXX>:<filesystem$<ANGLE-R>>
  $<$<COMPILE_LANGUAGE:CXX>:<functional$<ANGLE-R>>
  $<$<COMPILE_LANGUAGE:CXX>:<memory$<ANGLE-R>>
  $<$<COMPILE_LANGUAGE:CXX>:<mutex$<ANGLE-R>>
  $<$<COMPILE_LANGUAGE:CXX>:<string$<ANGLE-R>>
  $<$<COMPILE_LANGUAGE:CXX>:<vector$<ANGLE-R>>)
# GCC accepts a precompiled header of other optimisation options, but then mixes the two sets. So the
# rooms that are compiled with -O1 share another one, and files with options of their own have none.
get_target_property(sources switchyard SOURCES)
foreach(source IN LISTS sources)
  get_source_file_property(own_options ${source} TARGET_DIRECTORY switchyard COMPILE_OPTIONS)
  if(own_options)
    set_source_files_properties(${source} TARGET_DIRECTORY switchyard
      PROPERTIES SKIP_PRECOMPILE_HEADERS ON)
  endif()
endforeach()
if(TARGET switchyard_lab)
  target_precompile_headers(switchyard_lab REUSE_FROM switchyard)
endif()
if(SWITCHYARD_BUILD_CLI)
  get_target_property(headers switchyard PRECOMPILE_HEADERS)
  target_precompile_headers(switchyard_results PRIVATE ${headers})
  foreach(room IN ITEMS report bench cli_parts)
    target_precompile_headers(switchyard_${room} REUSE_FROM switchyard_results)
  endforeach()
  foreach(room IN ITEMS machine run)
    target_precompile_headers(switchyard_${room} REUSE_FROM switchyard)
  endforeach()
endif()
