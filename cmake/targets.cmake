# One function per kind of target, so that a folder's CMakeLists.txt is one line.

# The forms of the one library; the same objects go into each.
set(moiety_libraries moiety)
if(MOIETY_SHARED)
  list(APPEND moiety_libraries moiety_shared)
endif()

# moiety_choose_cuda(LIST): keeps x_cuda.cpp in a build with CUDA, and in one without the few
# no_x_cuda.cpp that say how it behaves.
function(moiety_choose_cuda list)
  set(absent ${${list}})
  set(present ${absent})
  list(FILTER absent INCLUDE REGEX "/no_[^/]*_cuda\\.cpp$")
  list(FILTER present INCLUDE REGEX "_cuda\\.cpp$")
  list(REMOVE_ITEM present ${absent})
  if(moiety_cuda)
    moiety_cuda_sources(${present})
    list(REMOVE_ITEM ${list} ${absent})
  else()
    list(REMOVE_ITEM ${list} ${present})
  endif()
  set(${list} ${${list}} PARENT_SCOPE)
endfunction()

# moiety_public_headers([PRIVATE file...]): headers directly in the folder are contracts, installed and
# each compiled alone, but for the PRIVATE ones; headers in sub-folders are never.
function(moiety_public_headers)
  cmake_parse_arguments(ARG "" "" "PRIVATE" ${ARGN})
  file(GLOB headers CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/*.h)
  foreach(private ${ARG_PRIVATE})
    if(NOT EXISTS ${CMAKE_CURRENT_SOURCE_DIR}/${private})
      message(FATAL_ERROR "${CMAKE_CURRENT_SOURCE_DIR}: the PRIVATE header ${private} does not exist")
    endif()
    list(REMOVE_ITEM headers ${CMAKE_CURRENT_SOURCE_DIR}/${private})
  endforeach()
  target_sources(moiety PUBLIC FILE_SET HEADERS BASE_DIRS ${CMAKE_SOURCE_DIR} FILES ${headers})
endfunction()

# moiety_say_cuda(FILE...): tells those of them that ask, by moiety/base/cuda_built.h, whether this
# build has CUDA. All others are compiled by the same command in both, so that ccache shares them.
function(moiety_say_cuda)
  foreach(source ${ARGN})
    file(STRINGS ${source} asks REGEX "moiety/base/cuda_built\\.h" LIMIT_COUNT 1)
    if(asks)
      set_property(SOURCE ${source} APPEND PROPERTY
        COMPILE_DEFINITIONS MOIETY_CUDA_BUILT=$<BOOL:${moiety_cuda}>)
    endif()
  endforeach()
endfunction()

# moiety_folder(NAME [PRIVATE header...] [EXCLUDE file...] [OPENMP file...] [LINK library...]): the
# library code of one folder of moiety/; the OPENMP files call OpenMP.
# Layers are checked by tools/check_layers.py; all folders link into the one library. A folder may be
# headers alone.
function(moiety_folder name)
  cmake_parse_arguments(ARG "" "" "PRIVATE;EXCLUDE;OPENMP;LINK" ${ARGN})
  moiety_public_headers(PRIVATE ${ARG_PRIVATE})
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/*.cpp)
  foreach(excluded ${ARG_EXCLUDE})
    list(REMOVE_ITEM sources ${CMAKE_CURRENT_SOURCE_DIR}/${excluded})
  endforeach()
  moiety_choose_cuda(sources)
  moiety_say_cuda(${sources})
  if(moiety_cuda)
    file(GLOB_RECURSE kernels CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/*.cu)
    moiety_cuda_sources(${kernels})
    list(APPEND sources ${kernels})
  endif()
  if(NOT sources)
    return()
  endif()
  # Loops of the fast CPU paths are written for the vectorizer; x_avx2_cpu.cpp says what runs where. GCC 12
  # may break down at -O3 over a precompiled header of a lower level.
  foreach(source ${sources})
    if(source MATCHES "_avx2_cpu\\.cpp$" AND CMAKE_SYSTEM_PROCESSOR STREQUAL "x86_64")
      set_source_files_properties(${source} PROPERTIES COMPILE_OPTIONS "-O3;-mavx2" SKIP_PRECOMPILE_HEADERS ON)
    elseif(source MATCHES "_cpu\\.cpp$")
      set_source_files_properties(${source} PROPERTIES COMPILE_OPTIONS "-O3" SKIP_PRECOMPILE_HEADERS ON)
    endif()
  endforeach()
  if(ARG_OPENMP AND moiety_openmp)
    set_source_files_properties(${ARG_OPENMP} PROPERTIES
      COMPILE_OPTIONS "${OpenMP_CXX_FLAGS}" SKIP_PRECOMPILE_HEADERS ON)
  endif()
  add_library(moiety_${name} OBJECT ${sources})
  target_include_directories(moiety_${name} PUBLIC ${CMAKE_SOURCE_DIR})
  moiety_precompile(moiety_${name})
  if(MOIETY_SHARED AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # What headers define is the shared library's own, also beside another version of it, and does not
    # keep it from being unloaded. Kernels of one architecture define nothing that is not also in these.
    list(FILTER kernels EXCLUDE REGEX "_sm[0-9]+\\.cu$")
    set_property(SOURCE ${kernels} APPEND PROPERTY COMPILE_OPTIONS -Xcompiler=-fno-gnu-unique)
    target_compile_options(moiety_${name} PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:-fno-gnu-unique>")
  endif()
  target_link_libraries(moiety_${name} PRIVATE ${ARG_LINK})
  foreach(library ${moiety_libraries})
    target_sources(${library} PRIVATE $<TARGET_OBJECTS:moiety_${name}>)
    target_link_libraries(${library} PRIVATE ${ARG_LINK} ${moiety_openmp})
  endforeach()
endfunction()

# moiety_suites(NAME LABELS label... [PROPERTIES ...]): ctest entries of the program tests_NAME, one a
# suite (cmake/suites.cmake). It runs in the build folder: from there the paths of sources are right
# that ccache makes relative.
function(moiety_suites name)
  cmake_parse_arguments(ARG "" "" "LABELS;PROPERTIES" ${ARGN})
  set(file ${CMAKE_CURRENT_BINARY_DIR}/${name}_suites)
  file(GENERATE OUTPUT ${file}.cmake CONTENT "set(name ${name})
set(program \"$<TARGET_FILE:tests_${name}>\")
set(list \"${file}.txt\")
set(folder \"${CMAKE_BINARY_DIR}\")
set(labels ${ARG_LABELS})
set(slow \"${moiety_slow_suites}\")
set(properties ${ARG_PROPERTIES})
include(\"${CMAKE_SOURCE_DIR}/cmake/suites.cmake\")
")
  set_property(DIRECTORY APPEND PROPERTY TEST_INCLUDE_FILES ${file}.cmake)
endfunction()

# moiety_tests(FOLDER): tests/FOLDER/*_test.cpp as one GoogleTest binary. Suites of FOLDERs whose ranks
# are threads take the cores of a small machine by themselves.
function(moiety_tests folder)
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/${folder}/*.cpp)
  add_executable(tests_${folder} ${sources})
  moiety_precompile(tests_${folder} GTEST)
  target_include_directories(tests_${folder} PRIVATE ${CMAKE_SOURCE_DIR})
  target_link_libraries(tests_${folder} PRIVATE moiety GTest::gtest GTest::gtest_main)
  set(properties "")
  if(folder IN_LIST moiety_distributed_tests)
    set(properties PROCESSORS 2)
  endif()
  moiety_suites(${folder} LABELS ${folder} PROPERTIES ${properties})
endfunction()

# moiety_gpu_tests(FOLDER): tests/FOLDER_gpu/*.cpp and *.cu as one GoogleTest binary. Its tests are
# skipped where no GPU is visible.
function(moiety_gpu_tests folder)
  set(target tests_${folder}_gpu)
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/${folder}_gpu/*.cpp
       ${CMAKE_CURRENT_SOURCE_DIR}/${folder}_gpu/*.cu)
  if(folder IN_LIST moiety_gpu_rank_tests)
    list(APPEND sources ${CMAKE_CURRENT_SOURCE_DIR}/support/gpu_environment.cpp)
  endif()
  moiety_cuda_sources(${sources})
  add_executable(${target} ${sources})
  set_target_properties(${target} PROPERTIES LINKER_LANGUAGE CXX)
  moiety_precompile(${target} GTEST)
  target_include_directories(${target} PRIVATE ${CMAKE_SOURCE_DIR})
  target_link_libraries(${target} PRIVATE moiety moiety::cudart GTest::gtest GTest::gtest_main)
  moiety_suites(${folder}_gpu LABELS ${folder} gpu PROPERTIES RESOURCE_LOCK gpu)
endfunction()

# moiety_mpi_tests(FOLDER): tests/FOLDER_mpi/*.cpp as one GoogleTest program of processes. It is run
# on 2, 3 and 4 processes of mpirun, and without symmetric memory; and on 3 that it starts itself,
# which needs no MPI. With --enable-recovery mpirun would exit with 0 whatever its processes do.
function(moiety_mpi_tests folder)
  set(target tests_${folder}_mpi)
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/${folder}_mpi/*.cpp)
  add_executable(${target} ${sources} ${CMAKE_CURRENT_SOURCE_DIR}/support/mpi/main.cpp)
  moiety_precompile(${target} GTEST)
  target_include_directories(${target} PRIVATE ${CMAKE_SOURCE_DIR})
  target_link_libraries(${target} PRIVATE moiety GTest::gtest)
  foreach(variant 3 "3;--no-map;--pieces")
    list(POP_FRONT variant ranks)
    string(JOIN "" suffix ${ranks} ${variant})
    set(name ${folder}_ranks_${suffix})
    add_test(NAME ${name} COMMAND ${target} --ranks=${ranks} ${variant})
    set_tests_properties(${name} PROPERTIES TIMEOUT 300 PROCESSORS ${ranks} LABELS "${folder}")
  endforeach()
  if(NOT MPI_CXX_FOUND OR NOT MPIEXEC_EXECUTABLE)
    return()
  endif()
  foreach(variant 2 3 4 "3;--no-map;--pieces")
    list(POP_FRONT variant ranks)
    string(JOIN "" suffix ${ranks} ${variant})
    set(name ${folder}_mpi_${suffix})
    add_test(NAME ${name}
             COMMAND ${MPIEXEC_EXECUTABLE} -np ${ranks} --allow-run-as-root --oversubscribe
                     --bind-to none $<TARGET_FILE:${target}> ${variant})
    # Open MPI keeps memory that belongs to parts which it has closed, so their names are gone.
    set_tests_properties(${name} PROPERTIES TIMEOUT 300 PROCESSORS ${ranks}
      LABELS "${folder};mpi" ENVIRONMENT "ASAN_OPTIONS=detect_leaks=0")
  endforeach()
endfunction()

# moiety_gpu_rank_tests(FOLDER): tests/FOLDER_gpu_ranks/*.cpp as one GoogleTest program, run as two
# processes that share a GPU.
function(moiety_gpu_rank_tests folder)
  set(target tests_${folder}_gpu_ranks)
  set(here ${CMAKE_CURRENT_SOURCE_DIR})
  file(GLOB sources CONFIGURE_DEPENDS ${here}/${folder}_gpu_ranks/*.cpp)
  moiety_cuda_sources(${sources})
  # What tests_comm_gpu compiles too has its flags from there.
  add_executable(${target} ${sources} ${here}/comm_gpu/spin.cu ${here}/support/gpu_environment.cpp
                 ${here}/support/mpi/main.cpp)
  set_target_properties(${target} PROPERTIES LINKER_LANGUAGE CXX)
  moiety_precompile(${target} GTEST)
  target_include_directories(${target} PRIVATE ${CMAKE_SOURCE_DIR})
  target_link_libraries(${target} PRIVATE moiety moiety::cudart GTest::gtest)
  add_test(NAME ${folder}_gpu_ranks COMMAND ${target} --ranks=2)
  set_tests_properties(${folder}_gpu_ranks PROPERTIES TIMEOUT 300 LABELS "${folder};gpu"
    RESOURCE_LOCK gpu)
endfunction()

# moiety_bench(FOLDER/NAME): bench/FOLDER/NAME_bench.cpp.
function(moiety_bench path)
  get_filename_component(name ${path} NAME)
  add_executable(${name}_bench ${path}_bench.cpp)
  moiety_precompile(${name}_bench)
  target_include_directories(${name}_bench PRIVATE ${CMAKE_SOURCE_DIR})
  target_link_libraries(${name}_bench PRIVATE moiety)
endfunction()
