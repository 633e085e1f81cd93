# Flags that every target of Moiety shares.
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE RelWithDebInfo CACHE STRING "Build type" FORCE)
endif()
# -O2 with line tables: fast enough to measure with, small enough to link often.
set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O2 -g1")
set(CMAKE_CXX_FLAGS_RELEASE "-O2")

# Results are bits (docs/numerics.md): no contraction of a*b+c; an fma stands only where the source
# says so. Nobody reads errno or the exception flags of arithmetic; keeping them up hinders the
# vectorizer.
set(moiety_warnings -Wall -Wextra)
set(moiety_cxx_options ${moiety_warnings} -ffp-contract=off -fno-math-errno -fno-trapping-math)
if(MOIETY_WERROR)
  list(APPEND moiety_cxx_options -Werror)
endif()
if(MOIETY_SANITIZE)
  # The library compiles in two thirds of the time.
  set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O1 -g1")
  list(APPEND moiety_cxx_options -fsanitize=${MOIETY_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  add_link_options(-fsanitize=${MOIETY_SANITIZE})
  # The resolvers of multiversioned functions run before a sanitizer's run time is up.
  add_compile_definitions(MOIETY_NO_SIMD_CLONES)
endif()
add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:${moiety_cxx_options}>")

# Standard headers are compiled once, for libraries and programs alike, and once more with GoogleTest
# for the tests: about a third of a cold build goes to them otherwise. Programs are compiled as libraries
# are, so that the result fits all; -fpch-preprocess lets ccache look into it.
option(MOIETY_PRECOMPILE "Compile standard headers once" ON)
if(MOIETY_PRECOMPILE)
  set(CMAKE_CXX_COMPILE_OPTIONS_PIE ${CMAKE_CXX_COMPILE_OPTIONS_PIC})
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:-fpch-preprocess>")
  endif()
endif()
# Two thirds of a build are tests; -O1 takes a quarter off them.
set(moiety_test_options "$<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CONFIG:RelWithDebInfo>>:-O1>")
# moiety_precompile(TARGET [GTEST]): the first target makes what the others take. Headers are named
# relative to the clone, so that ccache finds what another clone has compiled.
function(moiety_precompile target)
  cmake_parse_arguments(ARG "GTEST" "" "" ${ARGN})
  if(ARG_GTEST)
    target_compile_options(${target} PRIVATE ${moiety_test_options})
  endif()
  if(NOT MOIETY_PRECOMPILE)
    return()
  endif()
  set(maker moiety_precompiled)
  if(ARG_GTEST)
    set(maker moiety_precompiled_tests)
  endif()
  if(NOT TARGET ${maker})
    set(headers <cmake/precompiled.h>)
    add_library(${maker} OBJECT ${CMAKE_SOURCE_DIR}/cmake/precompiled.cpp)
    target_include_directories(${maker} PRIVATE ${CMAKE_SOURCE_DIR})
    if(ARG_GTEST)
      list(APPEND headers <gtest/gtest.h>)
      target_compile_options(${maker} PRIVATE ${moiety_test_options})
      target_link_libraries(${maker} PRIVATE GTest::gtest)
    endif()
    target_precompile_headers(${maker} PRIVATE ${headers})
    moiety_sum_precompiled(${maker} ${headers})
  endif()
  target_precompile_headers(${target} REUSE_FROM ${maker})
  if(TARGET ${maker}_sum)
    add_dependencies(${target} ${maker}_sum)
  endif()
endfunction()
# moiety_sum_precompiled(MAKER HEADER...): what ccache reads in place of a precompiled header: the text it was
# made from. GCC never writes the same bytes twice, so one that had to be made again would make all that a
# cache holds worthless.
function(moiety_sum_precompiled maker)
  if(NOT MOIETY_CCACHE OR NOT CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    return()
  endif()
  list(TRANSFORM ARGN PREPEND "#include ")
  list(JOIN ARGN "\n" includes)
  set(source ${CMAKE_CURRENT_BINARY_DIR}/${maker}_sum.h)
  file(CONFIGURE OUTPUT ${source} CONTENT "${includes}\n")
  set(sum ${CMAKE_CURRENT_BINARY_DIR}/CMakeFiles/${maker}.dir/cmake_pch.hxx.gch.sum)
  add_custom_command(
    OUTPUT ${sum}
    COMMAND ${CMAKE_CXX_COMPILER} -std=c++20 "-I$<JOIN:$<TARGET_PROPERTY:${maker},INCLUDE_DIRECTORIES>,;-I>" -E -P
            -x c++ ${source} -o ${sum} -MD -MF ${sum}.d -MT ${sum}
    DEPENDS ${source} DEPFILE ${sum}.d COMMAND_EXPAND_LISTS VERBATIM)
  add_custom_target(${maker}_sum DEPENDS ${sum})
endfunction()

# Compilations are cached outside the clone, so a fresh clone of the same tree builds quickly. g++ is known by
# its contents: an image that is made anew has the same one at another time.
find_program(MOIETY_CCACHE ccache)
if(MOIETY_CCACHE)
  set(moiety_launcher ${CMAKE_COMMAND} -E env CCACHE_BASEDIR=${CMAKE_SOURCE_DIR} CCACHE_NOHASHDIR=1
                      CCACHE_SLOPPINESS=pch_defines,time_macros)
  if(NOT CMAKE_CXX_COMPILER_LAUNCHER)
    set(CMAKE_CXX_COMPILER_LAUNCHER
        ${moiety_launcher} CCACHE_COMPILERCHECK=content CCACHE_PCH_EXTSUM=1 ${MOIETY_CCACHE})
  endif()
  list(APPEND moiety_launcher ${MOIETY_CCACHE})
endif()
