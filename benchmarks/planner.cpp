// What does a plan cost, ragged and decode, and the records of the single operations?
//
// A plan is the difference between a graph of 33 plans and one of 1, divided by 32: each has a plan
// buffer of its own, which the others write over in the L2 where they are large; the step table is
// warm. In the second series, "cold", a kernel that reads three times the L2 stands in front of
// each plan, and the same chain without the plans is taken off. Requests have lengths of their own,
// so phases are mixed. Bytes counted are those that a plan writes.
#include <optional>
#include <random>
#include <string>
#include <vector>

#include <quire/cache/cache_manager.h>
#include <quire/planner/plan_rule.h>
#include <quire/runtime/base/errors.h>

#include "benchmarks/support/program.h"
#include "benchmarks/support/report.h"

namespace {

using namespace quire;
using namespace quire::bench;

constexpr int kCopies = 33;
constexpr int kColdCopies = 16;
constexpr std::int32_t kPrefixMax = 255;  // tokens of a request before the step
constexpr std::uint32_t kSeed = 20261130;

// `rows` requests of so many tokens each, in a step of that shape.
struct Batch {
  std::int64_t rows, tokens_each;
  StepShape shape;
};

Batch ragged(std::int64_t rows, std::int64_t tokens) {
  return {rows, tokens / rows,
          StepShape::ragged(static_cast<std::int32_t>(rows), static_cast<std::int32_t>(tokens))};
}
Batch decode(std::int64_t rows) {
  return {rows, 1, StepShape::decode(static_cast<std::int32_t>(rows), 1)};
}

double bytes_of(const StepShape& shape) {
  constexpr std::int64_t kTokenBytes = sizeof(TokenRecord) + 5 * 4 + 4 * 8;
  constexpr std::int64_t kRowBytes = sizeof(BatchRowRecord) + 6 * 4;
  std::int64_t bytes = shape.tokens * kTokenBytes + shape.rows * kRowBytes;
  if (!shape.is_decode()) {
    for (const CompressionRule rule : {kCsaRule, kHcaRule}) {
      bytes += compress_capacity(rule, shape.rows, shape.tokens) *
               static_cast<std::int64_t>(sizeof(PlanRecord));
    }
  }
  return static_cast<double>(bytes);
}

Limits limits_of(const Batch& batch) {
  Limits limits;
  limits.seats_max = batch.rows;
  limits.context_max = kPrefixMax + kCopies * batch.tokens_each;
  limits.pages = batch.rows * limits.cells_max();
  limits.rows_max = batch.shape.rows;
  limits.tokens_max = max_of<std::int64_t>(batch.shape.tokens, kPrefixMax);
  limits.plan_buffers = kCopies;
  return limits;
}

// Plans behind one another, each of its own copy, and what one of them takes.
struct PlanChains {
  Backend& backend;
  const Stream& stream;
  std::function<void(int)> enqueue;  // the plan of a copy

  Distribution time_of_plan() const {
    const GraphExec many = chain(kCopies, nullptr, true);
    const GraphExec one = chain(1, nullptr, true);
    return time_of_copy(many, one, kCopies - 1, stream);
  }

  Distribution time_of_cold_plan(const ColdCache& cold) const {
    const GraphExec with = chain(kColdCopies, &cold, true);
    const GraphExec without = chain(kColdCopies, &cold, false);
    return time_of_copy(with, without, kColdCopies, stream);
  }

  GraphExec chain(int length, const ColdCache* cold, bool plans) const {
    return capture(backend, stream, [&] {
      for (int i = 0; i < length; ++i) {
        if (cold != nullptr) cold->enqueue(stream);
        if (plans) enqueue(i);
      }
    });
  }
};

// One step of the batch, prepared in each of 33 plan buffers; none is ever committed, so all of
// them start where the prefixes end.
class PlanWorld {
 public:
  PlanWorld(Backend& backend, const Batch& batch)
      : backend_(&backend), stream_(backend), cache_(backend, spec(), limits_of(batch)) {
    admit(batch);
    for (BatchRow& row : rows_) row.tokens = static_cast<std::int32_t>(batch.tokens_each);
    for (int buffer = 0; buffer < kCopies; ++buffer) {
      for (const BatchRow& row : rows_) {
        cache_.ledger().reserve(row.request, batch.tokens_each).value();
      }
      begin(rows_, batch.shape, buffer);
      enqueue(buffer);
    }
    stream_.wait();
  }

  PlanChains chains() const {
    return {*backend_, stream_, [this](int buffer) { enqueue(buffer); }};
  }

  void check() const {
    for (int buffer = 0; buffer < kCopies; ++buffer) {
      DeviceReport report{};
      PlanHeader header{};
      cache_.device().report(PlanBufferId(buffer), &report, stream_);
      const PlanHeader* device_header = cache_.device().plan_buffer(PlanBufferId(buffer)).header;
      backend_->copy(&header, device_header, sizeof header, stream_);
      stream_.wait();
      check_all_lived(report);
      QUIRE_CHECK(header.steps_at_plan > 0, "plan buffer ", buffer, " was not planned");
    }
  }

 private:
  static ModelSpec spec() {
    ModelSpec spec;
    spec.layers = {LayerKind::kCsa, LayerKind::kHca};
    return spec;
  }

  // Requests with random lengths, in as many steps as they need.
  void admit(const Batch& batch) {
    std::mt19937 random(kSeed);
    std::uniform_int_distribution<std::int32_t> length(1, kPrefixMax);
    const Limits& limits = cache_.ledger().limits();
    std::vector<BatchRow> step;
    std::int32_t tokens = 0;
    const auto run = [&] {
      begin(step, StepShape::ragged(static_cast<std::int32_t>(step.size()), tokens), 0);
      cache_.device().enqueue_plan(PlanBufferId(0), stream_);
      cache_.device().enqueue_commit(PlanBufferId(0), nullptr, nullptr, stream_);
      step.clear();
      tokens = 0;
    };
    for (std::int64_t i = 0; i < batch.rows; ++i) {
      const BatchRow row{cache_.ledger().admit(limits.context_max, limits.context_max).value(),
                         length(random)};
      cache_.ledger().reserve(row.request, row.tokens).value();
      if (tokens + row.tokens > limits.tokens_max) run();
      // Rows of one token come first in a ragged step.
      step.insert(row.tokens == 1 ? step.begin() : step.end(), row);
      tokens += row.tokens;
      rows_.push_back(row);
    }
    run();
  }

  void begin(const std::vector<BatchRow>& rows, StepShape shape, int buffer) {
    std::vector<Outcome> outcomes;
    for (const BatchRow& row : rows) outcomes.push_back({row.tokens, false});
    const StepId id = cache_.begin_step(rows, shape, PlanBufferId(buffer), stream_);
    cache_.ledger().settle(id, outcomes);
  }

  void enqueue(int buffer) const { cache_.device().enqueue_plan(PlanBufferId(buffer), stream_); }

  Backend* backend_;
  Stream stream_;
  mutable CacheManager cache_;  // what enqueues is not const
  std::vector<BatchRow> rows_;
};

void measure(Report& report, Backend& backend, const ColdCache* cold, const std::string& name,
             const Batch& batch, std::optional<double> at_most = {}) {
  const PlanWorld world(backend, batch);
  const bool is_decode = batch.shape.is_decode();
  const std::string axis = is_decode ? "batch" : "tokens";
  const std::int64_t size = is_decode ? batch.shape.rows : batch.shape.tokens;
  const double bytes = bytes_of(batch.shape);
  const auto add = [&](const std::string& what, const Distribution& times) {
    report.add({name + what, axis, size, times, at_most, bytes, {}, {}});
  };
  add("", world.chains().time_of_plan());
  if (cold != nullptr) add(", cold", world.chains().time_of_cold_plan(*cold));
  world.check();
}

// --- The single operation ---

// One list of each kind and the sums for each of 33 copies.
class RecordWorld {
 public:
  RecordWorld(Backend& backend, std::int64_t rows, std::int64_t tokens)
      : backend_(&backend),
        stream_(backend),
        rows_(rows),
        compress_(compress_capacity(kCsaRule, rows, tokens)),
        write_(write_capacity(kCsaRule, rows, tokens)),
        // Records, prefix, extend and three sums, each 16-byte aligned.
        copy_bytes_((compress_ + write_) * 16 + 5 * round_up<std::int64_t>((rows + 1) * 4, 16)),
        pool_(backend, kCopies * copy_bytes_),
        memory_(pool_, kCopies * copy_bytes_, stream_) {
    std::mt19937 random(kSeed);
    std::uniform_int_distribution<std::int32_t> length(0, kPrefixMax);
    std::vector<std::int32_t> prefix, extend;
    for (std::int64_t i = 0; i < rows; ++i) {
      prefix.push_back(length(random));
      extend.push_back(static_cast<std::int32_t>(tokens / rows));
      records_ += compress_count(kCsaRule, prefix.back(), extend.back());
    }
    for (int copy = 0; copy < kCopies; ++copy) {
      const RecordPlanParams params = params_of(copy);
      backend.copy(const_cast<std::int32_t*>(params.prefix), prefix.data(), rows * 4, stream_);
      backend.copy(const_cast<std::int32_t*>(params.extend), extend.data(), rows * 4, stream_);
      backend.plan_records(params, stream_);
    }
    stream_.wait();
  }

  PlanChains chains() const {
    return {*backend_, stream_,
            [this](int copy) { backend_->plan_records(params_of(copy), stream_); }};
  }

  double bytes() const {
    return static_cast<double>((compress_ + write_) * 16 + 3 * (rows_ + 1) * 4);
  }

  void check() const {
    for (int copy = 0; copy < kCopies; ++copy) {
      std::int32_t records = 0;
      backend_->copy(&records, params_of(copy).cu_compress + rows_, sizeof records, stream_);
      stream_.wait();
      QUIRE_CHECK(records == records_, "plan_records gave ", records, " records, not ", records_);
    }
  }

 private:
  RecordPlanParams params_of(int copy) const {
    RecordPlanParams params;
    params.rule = kCsaRule;
    params.rows = static_cast<std::int32_t>(rows_);
    std::byte* at = memory_.data() + copy * copy_bytes_;
    params.compress = reinterpret_cast<PlanRecord*>(at);
    params.write = params.compress + compress_;
    params.compress_capacity = compress_;
    params.write_capacity = write_;
    at += (compress_ + write_) * 16;
    const auto next = [&] {
      auto* list = reinterpret_cast<std::int32_t*>(at);
      at += round_up<std::int64_t>((rows_ + 1) * 4, 16);
      return list;
    };
    params.prefix = next();
    params.extend = next();
    params.cu_extend = next();
    params.cu_compress = next();
    params.cu_write = next();
    return params;
  }

  Backend* backend_;
  Stream stream_;
  std::int64_t rows_, compress_, write_, copy_bytes_;
  std::int32_t records_ = 0;
  MemoryPool pool_;
  Memory memory_;
};

void measure_records(Report& report, Backend& backend, const ColdCache& cold, std::int64_t rows,
                     std::int64_t tokens) {
  const RecordWorld world(backend, rows, tokens);
  const std::string name = concat("plan_records, ", rows, " requests");
  report.add({name, "tokens", tokens, world.chains().time_of_plan(), {}, world.bytes(), {}, {}});
  report.add({name + ", cold",
              "tokens",
              tokens,
              world.chains().time_of_cold_plan(cold),
              {},
              world.bytes(),
              {},
              {}});
  world.check();
}

}  // namespace

int main(int argc, char** argv) {
  return run_on_gpu(
      "bench_planner", "what a plan costs, ragged, decode, and of single operations", argc, argv,
      [](Report& report, Backend& backend, const Stream& stream) {
        report.set(measure_ceilings(backend, stream));
        const ColdCache cold(backend, stream);
        struct Shape {
          std::int64_t rows, tokens;
          double at_most_us;
        };
        constexpr Shape kShapes[] = {
            {1024, 65536, 8}, {256, 4096, 5}, {16, 65536, 0}, {1024, 1024, 0}};
        for (const Shape& shape : kShapes) {
          measure(report, backend, &cold, concat("ragged plan, ", shape.rows, " requests"),
                  ragged(shape.rows, shape.tokens),
                  shape.at_most_us > 0 ? std::optional(shape.at_most_us) : std::nullopt);
        }
        Batch padded = ragged(512, 32768);
        measure(report, backend, nullptr, "ragged plan, 32,768 live tokens", padded);
        padded.shape = StepShape::ragged(1024, 65536);
        measure(report, backend, nullptr, "the same, shape padded", padded);
        for (std::int64_t tokens = 256; tokens <= 262144; tokens *= 4) {
          measure(report, backend, nullptr, "ragged plan, 64 tokens a request",
                  ragged(tokens / 64, tokens));
        }
        for (const std::int64_t batch : {1, 8, 64, 128, 256, 512, 1024}) {
          measure(report, backend, batch == 64 || batch == 256 ? &cold : nullptr, "decode plan",
                  decode(batch));
        }
        for (const Shape& shape : kShapes) {
          measure_records(report, backend, cold, shape.rows, shape.tokens);
        }
      });
}
