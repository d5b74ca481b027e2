# For wheels: a library and a command that also run with an older glibc than this machine's. scripts/portable.sh makes the
# directory, which has glibc 2.28 as the linker sees it (stubs/) and oneDNN, fmt and libgomp built for it (lib/).
set(SWITCHYARD_PORTABLE "" CACHE PATH "What scripts/portable.sh made: link for glibc 2.28 (empty: for this machine's)")

if(SWITCHYARD_PORTABLE)
  set_target_properties(fmt::fmt PROPERTIES IMPORTED_LOCATION_NONE ${SWITCHYARD_PORTABLE}/lib/libfmt.a
                                            IMPORTED_LOCATION ${SWITCHYARD_PORTABLE}/lib/libfmt.a)
endif()

# switchyard_make_portable(TARGET): changes nothing but the link, so objects of another build are used as they are.
function(switchyard_make_portable target)
  if(NOT SWITCHYARD_PORTABLE)
    return()
  endif()
  target_link_options(${target} PRIVATE
    # Before the directories of this machine. -B is for the code that calls main().
    -B${SWITCHYARD_PORTABLE}/stubs -L${SWITCHYARD_PORTABLE}/lib -L${SWITCHYARD_PORTABLE}/stubs
    # libstdc++ of GCC 12 is newer than what systems with glibc 2.28 have. It is hidden from oneDNN, which has the system's.
    -static-libstdc++ LINKER:--exclude-libs,ALL
    # This machine's libgcc_s, against which we link and which the wheel does not carry, wants its newer glibc.
    LINKER:--allow-shlib-undefined)
  # Beside, not in the place of, what this build has made.
  set_target_properties(${target} PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/portable
                                             RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/portable)
endfunction()
