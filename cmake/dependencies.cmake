# Libraries that Moiety needs or uses where they are found. What is missing and needed ends the
# configuration with its Debian package; what is missing otherwise is a line in the summary. The
# latter are looked for by modules of CMake or of ours, which look for headers and libraries: a
# CMake package that a library brings may end the configuration where it misses something itself.
find_package(Threads MODULE REQUIRED)

# moiety_need(NAME VERSION PACKAGE): a library that Moiety cannot be built without.
macro(moiety_need name version package)
  find_package(${name} ${version} QUIET)
  if(NOT ${name}_FOUND)
    message(FATAL_ERROR "Moiety needs ${name}, which was not found. "
                        "Debian: apt-get install ${package}; bash setup.sh installs all that is needed.")
  endif()
endmacro()
moiety_need(fmt "" libfmt-dev)
moiety_need(nlohmann_json 3 nlohmann-json3-dev)
if(MOIETY_APPS)
  moiety_need(tomlplusplus 3 libtomlplusplus-dev)
  moiety_need(CLI11 2 libcli11-dev)
endif()
find_package(ZLIB MODULE QUIET)
if(MOIETY_TESTS)
  moiety_need(GTest "" libgtest-dev)
endif()

# oneDNN's own package demands the compute run time of GPUs that a distribution built it for; only
# its CPU engine is used here.
set(moiety_onednn FALSE)
if(MOIETY_ONEDNN)
  include(cmake/onednn.cmake)
endif()
include(cmake/tokenizer.cmake)
# Only for oneDNN, whose loops are OpenMP's: it is told to use one thread. Loops of our own have
# threads of their own (moiety/base/parallel.h).
set(moiety_openmp "")
if(moiety_onednn)
  find_package(OpenMP MODULE QUIET COMPONENTS CXX)
  if(OpenMP_CXX_FOUND)
    set(moiety_openmp OpenMP::OpenMP_CXX)
  endif()
endif()
# The thread sanitizer knows nothing of the processes that share memory, nor of Open MPI.
if(MOIETY_MPI AND NOT MOIETY_SANITIZE MATCHES "thread")
  set(MPI_CXX_SKIP_MPICXX ON)
  find_package(MPI MODULE QUIET COMPONENTS CXX)
endif()

# OUT := what is there, or what its absence means.
function(moiety_describe out found there missing)
  if(${found})
    set(${out} "${there}" PARENT_SCOPE)
  else()
    set(${out} "${missing}" PARENT_SCOPE)
  endif()
endfunction()

function(moiety_print_summary)
  moiety_describe(onednn moiety_onednn "${moiety_onednn_version}"
                  "no: the reference GEMM is used (Debian: libdnnl-dev)")
  moiety_describe(mpi MPI_CXX_FOUND "${MPI_CXX_VERSION}"
                  "no: ranks are threads (Debian: libopenmpi-dev openmpi-bin)")
  moiety_describe(zlib ZLIB_FOUND "${ZLIB_VERSION_STRING}"
                  "no: gzip input is refused (Debian: zlib1g-dev)")
  moiety_describe(zstd moiety_zstd "${moiety_zstd_version}"
                  "no: zstd input is refused (Debian: libzstd-dev)")
  moiety_describe(pcre2 moiety_pcre2 "${moiety_pcre2_version}"
                  "no: tokenizers with patterns are refused (Debian: libpcre2-dev)")
  moiety_describe(utf8proc moiety_utf8proc "${moiety_utf8proc_version}"
                  "no: tokenizers with NFC are refused (Debian: libutf8proc-dev)")
  moiety_describe(ccache MOIETY_CCACHE "${MOIETY_CCACHE}"
                  "no: every clone compiles all (Debian: ccache)")
  message(STATUS "Moiety ${PROJECT_VERSION}, ${CMAKE_BUILD_TYPE}, ${CMAKE_CXX_COMPILER_ID} "
                 "${CMAKE_CXX_COMPILER_VERSION}")
  message(STATUS "  oneDNN     ${onednn}")
  message(STATUS "  MPI        ${mpi}")
  message(STATUS "  zlib       ${zlib}")
  message(STATUS "  zstd       ${zstd}")
  message(STATUS "  PCRE2      ${pcre2}")
  message(STATUS "  utf8proc   ${utf8proc}")
  message(STATUS "  CUDA       ${moiety_cuda_summary}")
  message(STATUS "  sanitizers ${MOIETY_SANITIZE}")
  message(STATUS "  ccache     ${ccache}")
endfunction()
