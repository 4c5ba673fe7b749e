#include "examples/statistics.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <iomanip>
#include <sstream>

#include <quire/runtime/base/errors.h>

namespace quire::serving {
namespace {

std::string fixed(double value, int digits) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(digits) << value;
  return text.str();
}

std::string with_rate(std::int64_t tokens, double seconds) {
  return concat(tokens, "  (", fixed(static_cast<double>(tokens) / seconds, 0), " a second)");
}

std::string median_and_p99(const Latencies& latencies) {
  return concat(fixed(latencies.percentile(0.5), 2), " / ", fixed(latencies.percentile(0.99), 2),
                " ms");
}

double ratio(std::int64_t part, std::int64_t whole) {
  return whole == 0 ? 0.0 : static_cast<double>(part) / static_cast<double>(whole);
}

std::string of_total(std::int64_t part, std::int64_t total) { return concat(part, " of ", total); }

}  // namespace

double Latencies::percentile(double share) const {
  if (milliseconds_.empty()) return 0.0;
  std::vector<double> sorted = milliseconds_;
  const auto rank = static_cast<std::ptrdiff_t>(share * static_cast<double>(sorted.size() - 1));
  std::nth_element(sorted.begin(), sorted.begin() + rank, sorted.end());
  return sorted[static_cast<std::size_t>(rank)];
}

std::string table_of(const ServerStatistics& s, const Limits& limits, const CacheBytes& bytes,
                     double seconds) {
  std::ostringstream table;
  const auto row = [&](const char* what, const std::string& value) {
    table << "  " << std::left << std::setw(38) << what << value << '\n';
  };
  const auto mebibytes = [](std::int64_t count) { return concat(count / (1 << 20), " MiB"); };
  std::string replays;
  for (const auto& [rows, count] : s.replays_by_rows) {
    replays += concat(replays.empty() ? "" : ", ", rows, ": ", count);
  }
  row("time", fixed(seconds, 2) + " s");
  row("requests finished", concat(s.requests_finished));
  row("prompt tokens prefilled", with_rate(s.prompt_tokens, seconds));
  row("output tokens decoded", with_rate(s.output_tokens, seconds));
  row("time to first token, median / p99", median_and_p99(s.first_token));
  row("time per output token, median / p99", median_and_p99(s.next_token));
  row("prefill steps", concat(s.prefill_steps));
  row("decode steps, all replayed", concat(s.decode_steps));
  row("decode steps a visit", fixed(ratio(s.decode_steps, s.decode_visits), 0));
  row("drafts accepted, a batch row and step", fixed(s.drafts_accepted(), 2));
  row("replays per shape (batch rows: count)", replays);
  const std::chrono::duration<double> waited = s.host_waited;
  row("host waits for the device", fixed(100 * waited.count() / seconds, 0) + " % of the time");
  row("padded batch rows", concat(s.padded_rows));
  row("seats, most at once", of_total(s.seats_peak, limits.seats_max));
  row("pages, most at once", of_total(s.pages_peak, limits.pages));
  row("preemptions", concat(s.preemptions));
  row("admissions that had to wait", concat(s.admissions_delayed));
  row("memory: pages / seats / scratch",
      concat(mebibytes(bytes.pages), " / ", mebibytes(bytes.seats), " / ",
             mebibytes(bytes.scratch)));
  row("requests verified", concat(s.requests_verified));
  row("bytes verified", concat(s.bytes_verified));
  return table.str();
}

ProgressBar::ProgressBar(std::int64_t requests)
    : requests_(requests), terminal_(isatty(STDERR_FILENO) == 1) {}

ProgressBar::~ProgressBar() {
  if (drawn_ && terminal_) std::fputc('\n', stderr);
}

void ProgressBar::show(const ServerStatistics& s) {
  constexpr std::int64_t kWidth = 30;
  const auto filled =
      static_cast<std::size_t>(kWidth * s.requests_finished / std::max<std::int64_t>(1, requests_));
  const std::string bar = std::string(filled, '#') + std::string(kWidth - filled, '.');
  const std::string line =
      concat("[", bar, "] ", s.requests_finished, " of ", requests_, " requests, ", s.prompt_tokens,
             " prompt and ", s.output_tokens, " output tokens");
  std::fprintf(stderr, terminal_ ? "\r%s" : "%s\n", line.c_str());
  std::fflush(stderr);
  drawn_ = true;
}

}  // namespace quire::serving
