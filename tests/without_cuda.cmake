# Stands for a test that a build without CUDA does not have: CTest reports it as skipped, or as
# failed where a GPU is required.
#   cmake -P without_cuda.cmake
if("$ENV{QUIRE_REQUIRE_GPU}" STREQUAL "1")
  message(FATAL_ERROR "FAILED: QUIRE_REQUIRE_GPU=1, but this build has no CUDA")
endif()
message("SKIPPED: built without CUDA")
