# -g1: the lines of a stack, which is all that reports show; variables take a quarter of the compile time.
if(SWITCHYARD_SANITIZE STREQUAL "thread")
  add_compile_options(-fsanitize=thread -g1 -fno-omit-frame-pointer)
  add_link_options(-fsanitize=thread)
elseif(SWITCHYARD_SANITIZE STREQUAL "address")
  add_compile_options(-fsanitize=address,undefined -fno-sanitize-recover=all -g1
                      -fno-omit-frame-pointer)
  add_link_options(-fsanitize=address,undefined)
elseif(SWITCHYARD_SANITIZE)
  message(FATAL_ERROR "SWITCHYARD_SANITIZE is '${SWITCHYARD_SANITIZE}'; use 'thread' or 'address'")
endif()
if(SWITCHYARD_SANITIZE)
  # GCC 14 takes its own instrumentation for reads of what nobody wrote.
  add_compile_options($<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-maybe-uninitialized>)
  # Half the time to compile, and the tests are no slower.
  string(REPLACE "-O3" "-O1" CMAKE_CXX_FLAGS_RELEASE "${CMAKE_CXX_FLAGS_RELEASE}")
endif()

# switchyard_optimize_less(SOURCES...): files of the library for which -O1 is enough. With sanitizers all have it, and
# files without options of their own share precompiled headers.
function(switchyard_optimize_less)
  if(NOT SWITCHYARD_SANITIZE)
    set_source_files_properties(${ARGN} TARGET_DIRECTORY switchyard
      PROPERTIES COMPILE_OPTIONS $<$<CONFIG:Release>:-O1>)
  endif()
endfunction()
