# The Python package: the shared library and the command, beside the Python files that pyproject.toml
# names.
if(SKBUILD)
  install(TARGETS switchyard_c LIBRARY DESTINATION switchyard/lib NAMELINK_SKIP COMPONENT python)
  install(TARGETS switchyard_cli DESTINATION switchyard/bin COMPONENT python)
  if(SWITCHYARD_PORTABLE)
    install(DIRECTORY ${SWITCHYARD_PORTABLE}/licenses DESTINATION switchyard COMPONENT python)
    if(SWITCHYARD_HAS_GPU)
      file(GLOB license ${SWITCHYARD_CUTLASS_INCLUDE}/../../../*.dist-info/licenses/LICENSE.txt)
      install(FILES ${license} DESTINATION switchyard/licenses RENAME nvidia-cutlass COMPONENT python)
    endif()
  endif()
endif()

include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

install(TARGETS switchyard switchyard_c EXPORT switchyardTargets
        ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY include/switchyard DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
if(TARGET switchyard_cli)
  install(TARGETS switchyard_cli DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()

set(SWITCHYARD_CUDA_DEPENDENCY "")
if(SWITCHYARD_HAS_GPU)
  set(SWITCHYARD_CUDA_DEPENDENCY "find_dependency(CUDAToolkit)  # the static runtime")
endif()
set(SWITCHYARD_NETWORK_DEPENDENCY "")
if(SWITCHYARD_HAS_NETWORK)
  set(SWITCHYARD_NETWORK_DEPENDENCY "find_dependency(OpenSSL COMPONENTS Crypto)  # proofs between hosts")
endif()
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/switchyard)
install(EXPORT switchyardTargets NAMESPACE switchyard:: DESTINATION ${package_dir})
configure_package_config_file(cmake/switchyardConfig.cmake.in
  ${CMAKE_CURRENT_BINARY_DIR}/switchyardConfig.cmake INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/switchyardConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/switchyardConfig.cmake
              ${CMAKE_CURRENT_BINARY_DIR}/switchyardConfigVersion.cmake
              cmake/FindoneDNN.cmake
        DESTINATION ${package_dir})
