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
  MOIETY_INTERNAL = 11,   /* an exception that is none of the library's */
  MOIETY_INTERRUPTED = 12 /* a handler of a signal raised: see moiety_set_interrupt */
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

/* Lets Ctrl-C end what takes long (moiety_doctor, and all on checkpoints and folders): the addresses of
   PyGILState_Ensure, PyGILState_Release, PyErr_CheckSignals and PyErr_Clear. A call from the process's
   main thread then runs the handlers of signals every 100 ms, and when one of them raises it ends soon
   with MOIETY_INTERRUPTED, with results that nobody may use. Calls of other threads never ask. */
int moiety_set_interrupt(void* ensure, void* release, void* check_signals, void* clear_error);

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

/* Tables of tensors by address, made once and used every step. A request has "device" (-1: the CPU,
   else the number of a GPU) and its tensors as {"data": address, "dtype": "float32", "sizes": [..]},
   or null where one is absent; they are without gaps and must outlive the table. Making a table
   waits for a GPU; its steps do not, and can be captured. `stream` is a cudaStream_t of the device,
   on the CPU null; `facts` is JSON, {} where nothing is said here. */

/* AdamW (moiety/optim/adamw.h): {"beta1", "beta2", "eps", "seed", "segments": [{"grad", "master",
   "exp_avg", "exp_avg_sq", "weight"}, ...]}, tensors of n elements each. `step` is the address of an
   AdamWStep, 32 bytes on the device. */
int moiety_adamw_create(const char* request, int64_t* handle, char** facts);
int moiety_adamw_step(int64_t handle, void* step, void* stream);

/* The sum of squares of gradients (moiety/optim/grad_norm.h): {"grads": [tensor, ...]}; facts:
   {"bytes"} of `out`, on the device, whose first 8 are the sum as a double. */
int moiety_grad_statistics_create(const char* request, int64_t* handle, char** facts);
int moiety_grad_statistics_step(int64_t handle, void* out, void* stream);

/* Partial casts (moiety/quant/partial_cast.h): {"items": [{"format", "element", "pow2_scales",
   "through_bf16", "rows", "cols", "start", "end", "col", "master", "row_data", "row_scales",
   "col_data", "col_scales", "amax", "tensor_scale", "flags"}, ...]}; facts: {"bytes", "reductions":
   [{"dtype": "int32" | "uint8", "offset", "bytes"}, ...]} of `reduction`, on the device, whose
   ranges the caller reduces with MAX over ranks between the two steps. */
int moiety_partial_cast_create(const char* request, int64_t* handle, char** facts);
int moiety_partial_amax(int64_t handle, void* reduction, void* stream);
int moiety_partial_cast(int64_t handle, void* reduction, void* stream);

/* Frees a table; a handle that is none is nothing. */
int moiety_release(int64_t handle);

/* Checkpoints (docs/checkpoint-format.md) and Hugging Face folders, by one process. Requests and
   answers are JSON; an answer may be null where nobody wants it. "pieces" are [{"tensor", "slot",
   "shape", "start", "size", "data"}, ...]: for each box of a logical tensor the address of its
   float32 elements in the CPU's memory, row-major and without gaps. "run" is {"step", "tokens",
   "adam_t", "seed", "config", "state"}, the last two texts of JSON. */

/* {"path"}, a checkpoint or a run directory -> the fields of a run, {"path"} of the checkpoint, and
   {"tensors": {name: {"shape", "slots": {slot: dtype}}}}. */
int moiety_checkpoint_describe(const char* request, char** answer);
/* {"path", "weights_only", "pieces"} -> run. Tensors and slots must be the checkpoint's, but that
   moments may be left if `weights_only`; side files and amax histories always may. */
int moiety_checkpoint_load(const char* request, char** answer);
/* {"path", "run", "pieces"} -> {"path"} of the checkpoint step-<step> in the directory `path`. */
int moiety_checkpoint_save(const char* request, char** answer);
/* {"path"} -> {"family", "config": the text of config.json, "tensors": {name: shape}}, the tensors
   of the model by the names of checkpoints. */
int moiety_folder_describe(const char* request, char** answer);
/* {"path", "pieces"}: fills pieces of slot "weight". */
int moiety_folder_load(const char* request, char** answer);
/* {"path", "like" or "config", "dtype", "stacked", "replace", "pieces"} -> {"family", "keys",
   "files", "bytes"}: a new folder, with config.json and side files of the folder `like`, or with the
   text `config`. Needs room for a checkpoint of the weights beside it, which is removed. */
int moiety_folder_save(const char* request, char** answer);

#ifdef __cplusplus
}
#endif
