// Marks functions that run on the host and on the device: one source for both, so both give the
// same bits. Device code is compiled with --expt-relaxed-constexpr, so they may call constexpr
// functions of the standard library.
#pragma once

#include "moiety/base/simd.h"

#ifdef __CUDACC__
#define MOIETY_HD __host__ __device__
#else
#define MOIETY_HD
#endif

// An inline function for vectorized loops and for kernels.
#define MOIETY_HD_INLINE MOIETY_HD MOIETY_INLINE
