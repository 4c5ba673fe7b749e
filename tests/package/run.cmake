# Installs the build tree to a fresh prefix, builds tests/package against it, runs the program.
function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result OUTPUT_VARIABLE output
                  ERROR_VARIABLE output)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "${ARGN}\nfailed with ${result}:\n${output}")
  endif()
  message("${output}")
endfunction()

set(prefix "${BUILD_DIR}/package-test/prefix")
set(consumer "${BUILD_DIR}/package-test/consumer")
file(REMOVE_RECURSE "${BUILD_DIR}/package-test")
run("${CMAKE_COMMAND}" --install "${BUILD_DIR}" --prefix "${prefix}")
if(EXISTS "${prefix}/include/quire/kernels/exact_math.h")
  message(FATAL_ERROR "an internal header was installed")
endif()
run("${CMAKE_COMMAND}" -S "${SOURCE_DIR}/tests/package" -B "${consumer}" -G "${GENERATOR}"
    "-DCMAKE_PREFIX_PATH=${prefix}" "-DEMBED_SOURCE=${SOURCE_DIR}/examples/embed.cpp"
    "-DCMAKE_CXX_COMPILER=${CXX_COMPILER}")
run("${CMAKE_COMMAND}" --build "${consumer}")
run("${consumer}/embed")
