# CUDA code, where MOIETY_CUDA asks for it and nvcc is there. Sets moiety_cuda, and
# moiety_cuda_summary for the configure summary; a compiler that is missing is a line there.
#
# A GPU binary links the static CUDA run time and nothing else of the GPU: the driver and the
# vendor's libraries are opened at run time (docs/gpu-build.md).
set(moiety_cuda FALSE)
set(moiety_cuda_summary "no (cmake --preset gpu)")
if(NOT MOIETY_CUDA)
  return()
endif()
# On PATH, where toolkits are installed, or where setup.sh --gpu puts it.
set(moiety_cache "$ENV{XDG_CACHE_HOME}")
if(NOT moiety_cache)
  set(moiety_cache "$ENV{HOME}/.cache")
endif()
string(APPEND moiety_cache "/moiety")
if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
  find_program(MOIETY_NVCC nvcc PATHS /usr/local/cuda/bin ${moiety_cache}/cuda-13.0/nvidia/cu13/bin)
  if(MOIETY_NVCC)
    set(ENV{CUDACXX} ${MOIETY_NVCC})
  endif()
endif()
include(CheckLanguage)
# Each file names its architectures itself.
set(CMAKE_CUDA_ARCHITECTURES OFF)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  set(moiety_cuda_summary "no: no working nvcc (bash setup.sh --gpu); built for CPUs alone")
  unset(CMAKE_CUDA_COMPILER CACHE)  # the next configuration looks again
  return()
endif()
# Linked by name, as moiety::cudart.
set(CMAKE_CUDA_RUNTIME_LIBRARY None)
# -lineinfo: profilers and compute-sanitizer name the line.
set(CMAKE_CUDA_FLAGS_RELWITHDEBINFO "-O2 -Xcompiler=-g1 -lineinfo")
set(CMAKE_CUDA_FLAGS_RELEASE "-O2")
if(moiety_launcher AND NOT CMAKE_CUDA_COMPILER_LAUNCHER)
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${moiety_launcher})
endif()
enable_language(CUDA)
# CMake 3.25 does not know yet that nvcc speaks it.
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
endif()
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_EXTENSIONS OFF)
# nvcc's host compiler has them, in an order that must stay.
list(APPEND CMAKE_CUDA_IMPLICIT_INCLUDE_DIRECTORIES ${CMAKE_CXX_IMPLICIT_INCLUDE_DIRECTORIES})
set(moiety_cudart_hints ${CMAKE_CUDA_HOST_IMPLICIT_LINK_DIRECTORIES} ${CMAKE_CUDA_COMPILER_LIBRARY_ROOT}/lib64)
include(cmake/cudart.cmake)
set(moiety_cuda_include ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 13 OR NOT MOIETY_CUDART)
  set(moiety_cuda_summary "no: ${CMAKE_CUDA_COMPILER} is ${CMAKE_CUDA_COMPILER_VERSION}, at least 13.0 with \
libcudart_static.a is needed; built for CPUs alone")
  return()
endif()
set(moiety_cuda TRUE)
get_filename_component(moiety_cudart_folder ${MOIETY_CUDART} DIRECTORY)
set(moiety_cuda_summary "${CMAKE_CUDA_COMPILER_VERSION}, sm_90 + PTX, sm_90a, sm_100a")

# Headers of libraries that are opened at run time: the toolkit's, or those of setup.sh --gpu. Sets
# moiety_NAME and MOIETY_<NAME>_INCLUDE.
foreach(library "cublaslt|cublasLt.h|cu13|dense products by our own tiles"
                "cudnn|cudnn_graph.h|cudnn|attention by our own kernels"
                "nccl|nccl.h|nccl|GPU ranks of one host alone")
  string(REPLACE "|" ";" library ${library})
  list(GET library 0 name)
  list(GET library 1 header)
  list(GET library 2 folder)
  list(GET library 3 without)
  string(TOUPPER MOIETY_${name}_INCLUDE include)
  find_path(${include} ${header}
            HINTS ${moiety_cuda_include} ${moiety_cache}/gpu-headers/nvidia/${folder}/include)
  set(moiety_${name} FALSE)
  if(${include})
    set(moiety_${name} TRUE)
  else()
    string(APPEND moiety_cuda_summary "; no ${header} (bash setup.sh --gpu): ${without}")
  endif()
endforeach()

list(JOIN moiety_warnings "," host_options)
string(APPEND host_options ",-ffp-contract=off")
if(MOIETY_WERROR)
  string(APPEND host_options ",-Werror")
  add_compile_options("$<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings>")
endif()
# Compressed, kernels are a seventh of their size: -lineinfo keeps their PTX as text beside them.
add_compile_options("$<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr;--compress-mode=size;-Xcompiler=${host_options}>")
# Programs take the libraries that travel with them from ../lib, theirs and those that these need
# (tools/gpu): RPATH, since RUNPATH would not serve the latter. What a program does not use, such as
# oneDNN, it does not name.
set(CMAKE_BUILD_RPATH "$ORIGIN/../lib")
add_link_options(-Wl,--disable-new-dtags -Wl,--as-needed)

# moiety_cuda_sources(FILE...): flags of .cu files (architectures by suffix) and of the C++ files
# that call the CUDA run time.
function(moiety_cuda_sources)
  foreach(source ${ARGN})
    if(source MATCHES "\\.cpp$")
      set_property(SOURCE ${source} APPEND PROPERTY COMPILE_OPTIONS "-isystem${moiety_cuda_include}")
      continue()
    elseif(source MATCHES "_sm90\\.cu$")
      set(options -gencode=arch=compute_90a,code=sm_90a)
    elseif(source MATCHES "_sm100\\.cu$")
      set(options -gencode=arch=compute_100a,code=sm_100a)
    else()
      set(options -gencode=arch=compute_90,code=sm_90 -gencode=arch=compute_90,code=compute_90)
    endif()
    # Results are bits: IEEE fp32 with gradual underflow, an fma only where the source says so.
    list(APPEND options --fmad=false --ftz=false --prec-div=true)
    set_property(SOURCE ${source} APPEND PROPERTY COMPILE_OPTIONS ${options})
    set_property(GLOBAL APPEND PROPERTY moiety_exact_kernels ${source})
  endforeach()
endfunction()

# moiety_check_cuda_flags(): ends the configuration if a kernel of the library would be compiled
# without the flags that hold its bits.
function(moiety_check_cuda_flags)
  file(GLOB_RECURSE kernels CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/moiety/*.cu)
  get_property(exact GLOBAL PROPERTY moiety_exact_kernels)
  list(REMOVE_ITEM kernels ${exact})
  if(kernels)
    message(FATAL_ERROR "these kernels have not passed moiety_cuda_sources, which gives them "
                        "--fmad=false and an architecture: ${kernels}")
  endif()
endfunction()
