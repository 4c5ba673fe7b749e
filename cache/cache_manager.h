// The façade that most engines embed: one ledger and one device cache. Engines with several devices
// per ledger use the two classes apart.
#pragma once

#include <memory>
#include <span>

#include <quire/cache/ledger.h>
#include <quire/cache/limits.h>
#include <quire/cache/model_spec.h>
#include <quire/runtime/device_cache.h>

namespace quire {

class CacheManager {
 public:
  // Allocates all memory on the backend. Blocks. See DeviceCache and Ledger for the errors.
  CacheManager(Backend& backend, const ModelSpec& spec, const Limits& limits,
               const DeviceCacheOptions& options = {})
      : ledger_(limits), device_(backend, spec, limits, options) {}

  Ledger& ledger() { return ledger_; }
  const Ledger& ledger() const { return ledger_; }
  DeviceCache& device() { return device_; }
  const DeviceCache& device() const { return device_; }

  // prepare + apply. The stream is checked first, so that a refused call has changed nothing; where
  // apply fails all the same (a CUDA error), the step is abandoned.
  StepId begin_step(std::span<const BatchRow> rows, StepShape shape, PlanBufferId buffer,
                    StreamView stream, std::int32_t repeat = 1) {
    device_.check_can_apply(stream);
    const StepUpdate& update = ledger_.prepare(rows, shape, buffer, repeat);
    try {
      device_.apply(update, stream);
    } catch (...) {
      ledger_.abandon(update.id());
      throw;
    }
    return update.id();
  }

  void begin_padding_step(StepShape shape, PlanBufferId buffer, StreamView stream) {
    device_.apply(ledger_.padding_update(shape, buffer), stream);
  }

  // Takes one page for padding and shows it in the views of later plans; once, before captures.
  OrShortfall<PageId> reserve_sink() {
    auto page = ledger_.reserve_sink();
    if (page) device_.use_sink(page.value());
    return page;
  }

  // Forgets all requests and clears the memory in place, in stream order; captured graphs and the
  // sink stay valid.
  void reset(StreamView stream) {
    device_.clear(stream);  // refuses what cannot be cleared now, before anything is forgotten
    ledger_.reset();
  }

 private:
  Ledger ledger_;
  DeviceCache device_;
};

}  // namespace quire
