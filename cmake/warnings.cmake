# Designated initialisers leave the other members at their defaults on purpose, hence
# -Wno-missing-field-initializers.
option(SWITCHYARD_WERROR "Warnings are errors: for this project's own checks, not for users' builds" OFF)
add_library(switchyard_warnings INTERFACE)
target_compile_options(switchyard_warnings INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wno-sign-conversion
                            -Wnon-virtual-dtor -Wno-missing-field-initializers
                            $<$<BOOL:${SWITCHYARD_WERROR}>:-Werror>>
  $<$<AND:$<COMPILE_LANGUAGE:CUDA>,$<BOOL:${SWITCHYARD_WERROR}>>:--Werror=all-warnings>)
