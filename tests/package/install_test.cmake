# Installs the build into a folder of its own, then builds and runs examples/ against that, as a
# user would, with each form of the library. Headers that are installed are the public ones.
#   cmake -DBUILD=<build folder> -DSOURCE=<clone> -DFORMS=static,shared -P install_test.cmake
set(work ${BUILD}/package-test)
set(prefix ${work}/prefix)

function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT result EQUAL 0)
    list(JOIN ARGN " " command)
    # Verbatim: a FATAL_ERROR's text would be wrapped.
    message(NOTICE "${output}")
    message(FATAL_ERROR "${command}: ${result}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

file(REMOVE_RECURSE ${work})
run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${prefix})
foreach(public base/tensor_view.h moe/moe_layer.h checkpoint/saver.h)
  if(NOT EXISTS ${prefix}/include/moiety/${public})
    message(FATAL_ERROR "moiety/${public} is not installed")
  endif()
endforeach()
# Those of sub-folders, and one that its folder's CMakeLists.txt calls PRIVATE.
file(GLOB private RELATIVE ${prefix}/include ${prefix}/include/moiety/*/*/*.h
     ${prefix}/include/moiety/gemm/tile_gemm.h ${prefix}/include/moiety/*/*.cuh)
if(private)
  message(FATAL_ERROR "private headers are installed: ${private}")
endif()
string(REPLACE "," ";" forms ${FORMS})
foreach(form ${forms})
  set(build ${work}/examples-${form})
  # Not the clone's headers: only what is installed may be found.
  run(${CMAKE_COMMAND} -S ${SOURCE}/examples -B ${build} -G Ninja -DCMAKE_BUILD_TYPE=Release
      -DCMAKE_PREFIX_PATH=${prefix} -DMOIETY_LINK=${form})
  run(${CMAKE_COMMAND} --build ${build})
  run(${build}/expert_parallel)
  if(NOT output MATCHES "rank 3: 14 tokens went out, [0-9]+ rows came in, 0 wrong sums")
    message(FATAL_ERROR "expert_parallel said:\n${output}")
  endif()
  run(${build}/moe_layer)
  string(REGEX MATCHALL "loss [0-9.]+" losses "${output}")
  list(TRANSFORM losses REPLACE "loss " "")
  list(GET losses 0 first)
  list(GET losses -1 last)
  if(NOT last LESS 0.1 OR NOT first GREATER 0.3)
    message(FATAL_ERROR "moe_layer did not learn:\n${output}")
  endif()
  message(STATUS "${form}: loss ${first} -> ${last}")
endforeach()
if(EXISTS ${prefix}/bin/moiety)
  run(${prefix}/bin/moiety --version)
endif()
