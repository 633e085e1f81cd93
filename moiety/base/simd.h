// Marks a function of a fast CPU path to be compiled for several instruction sets; the best one is
// chosen when the program starts. Contraction is off everywhere, so all of them give the same bits.
// Functions that a marked function calls must be inlined into it (MOIETY_INLINE) to be vectorized
// with it.
#pragma once

#define MOIETY_INLINE inline __attribute__((always_inline))

#if !defined(__x86_64__) || defined(MOIETY_NO_SIMD_CLONES)
#define MOIETY_SIMD_CLONES
#elif defined(MOIETY_NO_AVX512_CLONES)  // tests of what a processor without it takes
#define MOIETY_SIMD_CLONES __attribute__((target_clones("arch=x86-64-v3", "default")))
#else
#define MOIETY_SIMD_CLONES \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#endif
