// The original c4 kernels' operations on the host: pool into an output row, and keep raw rows in a
// ring of 8 or in page-aligned windows of 4 (SPEC 1.7 to 1.9). No norm, no RoPE, no quantisation.
#include <quire/kernels/host/entry.h>
#include <quire/kernels/host/float_environment.h>
#include <quire/kernels/host/operations.h>

#include <cstring>

#include <quire/kernels/exact_math.h>
#include <quire/kernels/fp8.h>

namespace quire::host {
namespace {

// What decode and prefill share: where rows lie, and how a result is written.
struct C4Memory {
  C4StateMode mode;
  ElementType type;
  ElementType output_type;
  std::int64_t d;
  void* state;
  const void* input;
  void* output;
  float bias_values[kC4Rows * kHeadDim];
  const float* biases[kC4Rows];

  template <class Params>
  explicit C4Memory(const Params& params)
      : mode(params.mode),
        type(params.type),
        output_type(params.output_type),
        d(params.head_dim),
        state(params.state),
        input(params.input),
        output(params.output) {
    if (params.bias == nullptr) return;  // nothing is pooled
    widen({params.bias, type}, 0, kC4Rows * d, bias_values);
    bias_rows(bias_values, BiasOrder::kKernel, d, biases);
  }
  C4Memory(const C4Memory&) = delete;  // `biases` point into it
  C4Memory& operator=(const C4Memory&) = delete;

  std::int32_t slots() const { return mode == C4StateMode::kRing ? kC4RingTokens : kC4PageTokens; }

  // Row of `position` in ring or page `index`.
  SourceRow state_row(std::int64_t index, std::int32_t position) const {
    return row_of(state, type, 4 * d, index * slots() + position % slots());
  }
  SourceRow input_row(std::int64_t row) const { return row_of(input, type, 4 * d, row); }

  void write_state(std::int64_t index, std::int32_t position, std::int64_t row) const {
    const std::int64_t offset = (index * slots() + position % slots()) * 4 * d * bytes_of(type);
    std::memcpy(static_cast<std::byte*>(state) + offset, input_row(row).data,
                static_cast<std::size_t>(4 * d * bytes_of(type)));
  }

  void write_entry(const SourceRow (&rows)[kC4Rows], std::int64_t row) const {
    float entry[kHeadDim];
    pool_c4(d, rows, biases, entry);
    std::byte* to = static_cast<std::byte*>(output) + row * d * bytes_of(output_type);
    for (std::int64_t c = 0; c < d; ++c) {
      if (output_type == ElementType::kBfloat16) {
        const std::uint16_t half = exact::to_bf16(entry[c]);
        std::memcpy(to + 2 * c, &half, sizeof half);
      } else {
        // One NaN for all machines: which payload survives an operation is not part of IEEE 754.
        const float value = exact::is_nan(entry[c]) ? exact::from_bits(exact::kNanBits) : entry[c];
        std::memcpy(to + 4 * c, &value, sizeof value);
      }
    }
  }
};

// SPEC 1.9: the page that holds row i of an event whose leading `older` rows precede the chunk.
std::int32_t page_of_row(const C4PageBundle& bundle, std::int32_t older, std::int32_t i) {
  return i < 4 && older > 4 ? bundle.load_first_page : bundle.load_second_page;
}

}  // namespace

void compress_c4_decode(const CompressC4DecodeParams& params) {
  const FloatEnvironment environment;
  const C4Memory memory(params);
  for (std::int32_t b = 0; b < params.batch; ++b) {
    if (params.seq_lens[b] <= 0) continue;
    const std::int32_t position = params.seq_lens[b] - 1;
    memory.write_state(params.indices[b], position, b);
    if (!closes_entry(kCsaRule, position)) continue;

    SourceRow rows[kC4Rows];
    for (std::int32_t i = position == 3 ? 4 : 0; i < kC4Rows; ++i) {
      const bool previous = memory.mode == C4StateMode::kPageAligned && i < 4;
      rows[i] = memory.state_row(previous ? params.previous_pages[b] : params.indices[b],
                                 position - 7 + i);
    }
    memory.write_entry(rows, b);
  }
}

void compress_c4_prefill(const CompressC4PrefillParams& params) {
  const FloatEnvironment environment;
  const C4Memory memory(params);
  const bool paged = memory.mode == C4StateMode::kPageAligned;
  for (std::int64_t k = 0; k < params.compress_capacity; ++k) {
    const PlanRecord& record = params.compress[k];
    if (record.ragged_id == kPaddingRaggedId) continue;
    const auto position = static_cast<std::int32_t>(record.position);
    const auto older = static_cast<std::int32_t>(record.window_len);
    SourceRow rows[kC4Rows];
    for (std::int32_t i = position == 3 ? 4 : 0; i < kC4Rows; ++i) {
      const std::int64_t index =
          paged ? page_of_row(params.bundles[record.batch_id], older, i)
                : params.indices[record.batch_id];
      rows[i] = i < older ? memory.state_row(index, position - 7 + i)
                          : memory.input_row(static_cast<std::int64_t>(record.ragged_id) - 7 + i);
    }
    memory.write_entry(rows, record.ragged_id);
  }
  for (std::int64_t k = 0; k < params.write_capacity; ++k) {
    const PlanRecord& record = params.write[k];
    if (record.ragged_id == kPaddingRaggedId) continue;
    const auto position = static_cast<std::int32_t>(record.position);
    const bool first_page = paged && position < params.bundles[record.batch_id].last_position;
    memory.write_state(first_page ? params.bundles[record.batch_id].write_first_page
                                  : params.indices[record.batch_id],
                       position, record.ragged_id);
  }
}

}  // namespace quire::host
