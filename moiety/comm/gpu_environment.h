// The environment that ranks on GPUs need of the CUDA driver, which reads it when it starts.
#pragma once

namespace moiety::comm {

// Sets the variables below where the caller's environment does not. To be called before anything
// touches CUDA and before other threads start: at the beginning of main.
//
//   CUDA_MODULE_LOADING=EAGER         The first launch of a kernel loads it, which waits for the
//                                     GPU, on which another rank may wait for that launch.
//   CUDA_DEVICE_MAX_CONNECTIONS=32    Streams share queues of the GPU, 8 by default; in one queue a
//                                     waiting kernel holds up the one it waits for.
//   NCCL_NVLS_ENABLE=0                NVLink multicast is not used, by nobody.
void prepare_gpu_environment();

}  // namespace moiety::comm
