# Finds every package. Where some are missing, names their Debian packages in
# <build>/missing-packages.txt, which tools/ installs from, and stops.
set(quire_missing "")
function(quire_find name debian)
  find_package(${name} QUIET ${ARGN})
  if(NOT ${name}_FOUND)
    list(APPEND quire_missing ${debian})
    set(quire_missing "${quire_missing}" PARENT_SCOPE)
  endif()
endfunction()

find_package(Threads REQUIRED)
quire_find(spdlog libspdlog-dev)
quire_find(nlohmann_json nlohmann-json3-dev)
if(PROJECT_IS_TOP_LEVEL)
  quire_find(doctest doctest-dev)
  quire_find(CLI11 libcli11-dev)
endif()
if(QUIRE_BENCHMARKS)
  quire_find(benchmark libbenchmark-dev)
endif()

file(REMOVE "${CMAKE_BINARY_DIR}/missing-packages.txt")
if(quire_missing)
  string(REPLACE ";" "\n" lines "${quire_missing}")
  file(WRITE "${CMAKE_BINARY_DIR}/missing-packages.txt" "${lines}\n")
  message(FATAL_ERROR "quire: missing packages: ${quire_missing}. ./tools/test and ./tools/serve "
                      "install them; by hand: apt-get install <the same>")
endif()
