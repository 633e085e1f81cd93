# One function per kind of target, so that a folder's CMakeLists.txt is one line.

# moiety_folder(NAME [EXCLUDE file...]): the library code of one folder of moiety/.
# Layers are checked by tools/check_layers.py; all folders link into the one library `moiety`.
function(moiety_folder name)
  cmake_parse_arguments(ARG "" "" "EXCLUDE" ${ARGN})
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/*.cpp)
  foreach(excluded ${ARG_EXCLUDE})
    list(REMOVE_ITEM sources ${CMAKE_CURRENT_SOURCE_DIR}/${excluded})
  endforeach()
  # Loops of the fast CPU paths are written for the vectorizer.
  foreach(source ${sources})
    if(source MATCHES "_cpu\\.cpp$")
      set_source_files_properties(${source} PROPERTIES COMPILE_OPTIONS "-O3")
    endif()
  endforeach()
  add_library(moiety_${name} OBJECT ${sources})
  target_include_directories(moiety_${name} PUBLIC ${CMAKE_SOURCE_DIR})
  target_sources(moiety PRIVATE $<TARGET_OBJECTS:moiety_${name}>)
endfunction()

# moiety_tests(FOLDER): tests/FOLDER/*_test.cpp as one GoogleTest binary, one ctest entry.
function(moiety_tests folder)
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/${folder}/*.cpp)
  add_executable(tests_${folder} ${sources})
  target_include_directories(tests_${folder} PRIVATE ${CMAKE_SOURCE_DIR})
  target_link_libraries(tests_${folder} PRIVATE moiety GTest::gtest GTest::gtest_main)
  add_test(NAME ${folder} COMMAND tests_${folder})
  set_tests_properties(${folder} PROPERTIES TIMEOUT 900)
endfunction()

# moiety_bench(FOLDER/NAME): bench/FOLDER/NAME_bench.cpp.
function(moiety_bench path)
  get_filename_component(name ${path} NAME)
  add_executable(${name}_bench ${path}_bench.cpp)
  target_include_directories(${name}_bench PRIVATE ${CMAKE_SOURCE_DIR})
  target_link_libraries(${name}_bench PRIVATE moiety)
endfunction()
