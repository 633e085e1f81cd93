# Read by ctest: an entry for each suite of a GoogleTest program, NAME.SUITE. The program is asked for
# its suites when tests are about to run, and again when it was built anew; a build asks nothing.
#   name, program  of the program     list        the file that keeps its suites
#   folder         to run it in       properties  of all entries
#   labels         of all entries     slow        regular expression of the entries labelled slow
if(NOT EXISTS ${program})
  add_test(${name}.not_built ${CMAKE_COMMAND} -E cat ${program})
  return()
endif()
if(${program} IS_NEWER_THAN ${list})
  execute_process(COMMAND ${program} --gtest_list_tests WORKING_DIRECTORY ${folder}
                  RESULT_VARIABLE result OUTPUT_VARIABLE output)
  if(NOT result EQUAL 0)
    add_test(${name}.cannot_run ${program})
    return()
  endif()
  file(WRITE ${list} "${output}")
endif()
# A suite's line has no indentation and ends with a point, after which a type may be named.
file(STRINGS ${list} suites REGEX "^[^ ]+\\.( |$)")
foreach(suite ${suites})
  string(REGEX REPLACE "\\.( .*)?$" "" suite "${suite}")
  set(entry ${name}.${suite})
  add_test(${entry} ${program} --gtest_filter=${suite}.*)
  set(entry_labels ${labels})
  if(entry MATCHES "${slow}")
    list(APPEND entry_labels slow)
  endif()
  set_tests_properties(${entry} PROPERTIES WORKING_DIRECTORY ${folder} TIMEOUT 1800
                       LABELS "${entry_labels}" ${properties})
endforeach()
