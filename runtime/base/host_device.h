// Marks functions that nvcc compiles for both sides; empty for every other compiler, so that the
// headers that hold the shared arithmetic and the planning rule also compile with plain g++.
#pragma once

#ifdef __CUDACC__
#define QUIRE_HOST_DEVICE __host__ __device__
#else
#define QUIRE_HOST_DEVICE
#endif
