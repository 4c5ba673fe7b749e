// Ranges of the limits. The upper ends keep every count, length and id that travels in a step
// update in 32 bits; they lie far above any machine's memory.
#include <quire/cache/limits.h>

#include <quire/runtime/base/errors.h>

namespace quire {
namespace {

constexpr std::int64_t kCountMax = std::int64_t{1} << 24;   // seats, batch rows
constexpr std::int64_t kTokensMax = std::int64_t{1} << 30;  // tokens, pages, cells
constexpr std::int64_t kSmallMax = std::int64_t{1} << 16;   // drafts, repeats, holds
constexpr std::int64_t kFewMax = 1024;                      // plan buffers, steps in flight

void check_range(const char* name, std::int64_t value, std::int64_t least, std::int64_t most) {
  QUIRE_CHECK(value >= least && value <= most, "Limits::", name, " is ", value,
              "; supported: ", least, " to ", most);
}

}  // namespace

void Limits::check() const {
  check_range("seats_max", seats_max, 1, kCountMax);
  check_range("pages", pages, 1, kTokensMax);
  check_range("rows_max", rows_max, 1, kCountMax);
  check_range("tokens_max", tokens_max, 1, kTokensMax);
  check_range("context_max", context_max, 1, kTokensMax);
  check_range("draft_max", draft_max, 0, kSmallMax);
  check_range("repeat_max", repeat_max, 1, kSmallMax);
  check_range("run_ahead_max", run_ahead_max, 0, kFewMax);
  check_range("plan_buffers", plan_buffers, 1, kFewMax);
  check_range("holds_max", holds_max, 0, kSmallMax);
  QUIRE_CHECK(pages >= cells_max(), "Limits::pages is ", pages, ", but one request of context_max ",
              context_max, " tokens needs ", cells_max(), " pages of ", kPageTokens,
              " tokens; give more pages or lower context_max to at most ", pages * kPageTokens);
  QUIRE_CHECK(tokens_max >= draft_max + 1, "Limits::tokens_max is ", tokens_max,
              ", but one batch row may have draft_max + 1 = ", draft_max + 1, " tokens");
  QUIRE_CHECK(update_cells_max() <= kTokensMax, "Limits: one step could change ",
              update_cells_max(), " page table cells (tokens_max ", tokens_max, ", repeat_max ",
              repeat_max, ", rows_max ", rows_max, "); supported: at most ", kTokensMax);
}

}  // namespace quire
