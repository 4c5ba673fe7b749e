// Views of the two kinds of stream. A view owns nothing and is never made from 0 or nullptr: the
// legacy default stream cannot be named by accident.
#pragma once

#include <cstddef>

struct CUstream_st;  // cudaStream_t is CUstream_st*

namespace quire {

class HostStream;

class StreamView {
 public:
  StreamView(CUstream_st* cuda_stream) : handle_(cuda_stream), host_(false) {}  // NOLINT: a view
  StreamView(HostStream& host_stream) : handle_(&host_stream), host_(true) {}   // NOLINT: a view
  StreamView(int) = delete;
  StreamView(std::nullptr_t) = delete;

  bool is_host() const { return host_; }
  CUstream_st* cuda() const { return host_ ? nullptr : static_cast<CUstream_st*>(handle_); }
  HostStream* host() const { return host_ ? static_cast<HostStream*>(handle_) : nullptr; }

  friend bool operator==(const StreamView&, const StreamView&) = default;

 private:
  void* handle_;
  bool host_;
};

}  // namespace quire
