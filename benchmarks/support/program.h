// What every program on a GPU has in common: its report, a device or exit 77, a backend, a stream;
// and the proof that the rows it measured lived.
#pragma once

#include <cstdio>
#include <memory>

#include <quire/planner/plan.h>
#include <quire/runtime/base/errors.h>
#include <quire/runtime/owners.h>

#include "benchmarks/support/report.h"

namespace quire::bench {

// Calls body(report, backend, stream). The program's exit status.
template <class Body>
int run_on_gpu(const char* program, const char* question, int argc, char** argv, const Body& body) {
  Report report(program, question, argc, argv);
  if (cuda_device_count() == 0) {
    std::puts("no CUDA device");
    return 77;
  }
  const auto backend = make_cuda_backend();
  const Stream stream(*backend);
  body(report, *backend, stream);
  return report.finish();
}

// Throws where a row was inert, or an append or commit found no plan: what was measured would be
// nothing.
inline void check_all_lived(const DeviceReport& report) {
  const std::int32_t inert = report.rows_at_limit + report.rows_stopped + report.rows_out_of_steps +
                             report.rows_wrong_shape + report.rows_kept_wrong +
                             report.appends_unplanned + report.commits_unplanned;
  QUIRE_CHECK(inert == 0, "the benchmark ran inert rows: ", inert);
}

}  // namespace quire::bench
