# cmake --install puts the library, its public headers and the package quire in place.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

# Shared by the sources of the library alone: the arithmetic, parts of kernels, states of classes.
set(quire_internal_headers
  "exact_math\\.h|fp8\\.h|rope_angle\\.h|known_answers\\.h|known_answers_launch\\.h"
  "|host/entry\\.h|host/hca\\.h|hca\\.cuh"
  "|float_environment\\.h|entry\\.cuh|pool\\.cuh|planner\\.cuh|step_rule\\.h|device_planner\\.h"
  "|ledger_state\\.h|device_cache_state\\.h|memory_layout\\.h|device_guard\\.h|operation_checks\\.h"
  "|gather\\.h|stop_rule\\.h|read_lists\\.cuh|ragged_sums\\.cuh")
string(CONCAT quire_internal_headers ${quire_internal_headers})

install(TARGETS quire EXPORT quireTargets ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}")
foreach(folder cache planner kernels runtime)
  install(DIRECTORY "${PROJECT_SOURCE_DIR}/${folder}"
    DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}/quire"
    FILES_MATCHING PATTERN "*.h" PATTERN "*.cuh"
    REGEX "/(${quire_internal_headers})$" EXCLUDE)
endforeach()

set(quire_package_dir "${CMAKE_INSTALL_LIBDIR}/cmake/quire")
configure_package_config_file("${PROJECT_SOURCE_DIR}/cmake/quireConfig.cmake.in"
  "${PROJECT_BINARY_DIR}/quireConfig.cmake" INSTALL_DESTINATION "${quire_package_dir}")
write_basic_package_version_file("${PROJECT_BINARY_DIR}/quireConfigVersion.cmake"
  COMPATIBILITY SameMinorVersion)
install(EXPORT quireTargets NAMESPACE quire:: DESTINATION "${quire_package_dir}")
install(FILES "${PROJECT_BINARY_DIR}/quireConfig.cmake"
  "${PROJECT_BINARY_DIR}/quireConfigVersion.cmake" DESTINATION "${quire_package_dir}")
