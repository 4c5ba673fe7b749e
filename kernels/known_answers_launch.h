// Computes the known answers of SPEC 3.7 on the current device, to be compared with the host's
// before a cache is opened.
#pragma once

#include <cstdint>
#include <vector>

struct CUstream_st;  // cudaStream_t is CUstream_st*

namespace quire::cuda {

// One word of 32 bits per known answer, in order. Blocks until the device is done with them; the
// stream must not be capturing. CudaError where the device refuses.
std::vector<std::uint32_t> wait_for_known_answers(CUstream_st* stream);

// Loads the kernel on the current device.
void load_known_answers_kernel();

}  // namespace quire::cuda
