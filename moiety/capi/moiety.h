/* The library's C interface, for languages that open libmoiety.so themselves (Python's ctypes): what
   is no operation on tensors. Texts are UTF-8 and end with a zero byte.

   A function that can fail returns MOIETY_OK or the code of an error, whose text moiety_last_error()
   has. No C++ exception leaves any of them. They may be called from any thread, several at once. */
#pragma once

#include <stdint.h> /* NOLINT: for C too */

#ifdef __cplusplus
extern "C" {
#endif

/* One code for every kind of moiety/base/error.h; codes keep their numbers. */
enum MoietyCode {
  MOIETY_OK = 0,
  MOIETY_INVALID_ARGUMENT = 1,
  MOIETY_UNSUPPORTED = 2,
  MOIETY_CUDA = 3,
  MOIETY_COMM = 4,
  MOIETY_IO = 5,
  MOIETY_OUT_OF_MEMORY = 6,
  MOIETY_USAGE = 7,
  MOIETY_DATA = 8,
  MOIETY_CHECKPOINT = 9,
  MOIETY_NUMERICAL = 10,
  MOIETY_INTERNAL = 11 /* an exception that is none of the library's */
};

/* The name of a code, "InvalidArgument"; "?" for a number that is none. */
const char* moiety_code_name(int code);
/* The text of the calling thread's last error; empty before the first. Valid until its next one. */
const char* moiety_last_error(void);
/* "0.1.0". */
const char* moiety_version(void);

/* Texts that a function writes to a char** are the caller's, who gives them back here; null is
   legal. */
void moiety_free(char* text);

/* {"version", "cuda", "cuda_runtime", "gpus", "gpu_text", "engine_float32", "engine_bfloat16",
   "onednn", "threads"}: what this build has and chooses on this machine. Creates no GPU context. */
int moiety_build_info(char** json);
/* What `moiety doctor --json` says (moiety/train/health.h). `directory`: the disk that is looked at;
   `measure`: also times products and the disk, about two seconds. */
int moiety_doctor(const char* directory, int measure, char** json);
/* Allocations and releases of GPU or pinned memory, and waits for a GPU, by the calling thread since
   it started. */
int moiety_counters(int64_t* allocations, int64_t* waits);

/* The moves that lead from the keys of a file to those that are asked for
   (moiety/checkpoint/key_remap.h). Request:
     {"keys": [{"name": "a.weight0", "shape": [8, 4]}, ...],
      "modules": [{"name": "a", "experts": 2, "gated": false}, ...],
      "form": "packed" | "indexed", "from_interleave": 0, "to_interleave": 0}
   Answer:
     {"moves": [{"source": {"name", "shape"}, "target": {"name", "shape"}, "of_experts": true,
                 "expert": 0, "packed_source": false, "packed_target": true,
                 "from_interleave": 0, "to_interleave": 0}, ...]}
   MOIETY_CHECKPOINT for keys that leave a choice, with the missing indices. */
int moiety_key_remap(const char* request, char** moves);

#ifdef __cplusplus
}
#endif
