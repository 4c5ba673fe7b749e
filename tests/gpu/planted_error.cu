// Writes beyond its allocation: tools/sanitize demands that compute-sanitizer says so.
#include <cuda_runtime_api.h>

__global__ void write_at(int* memory, int index) { memory[index] = 1; }

int main() {
  int* memory = nullptr;
  if (cudaMalloc(&memory, 4 * sizeof(int)) != cudaSuccess) return 1;
  write_at<<<1, 1>>>(memory, 4);
  return cudaDeviceSynchronize() == cudaSuccess ? 0 : 1;
}
