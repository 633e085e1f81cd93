# cmake --install: program with its completion for shells and manual page, library in both forms,
# public headers, and the package that find_package(moiety COMPONENTS static|shared) finds.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(package_folder ${CMAKE_INSTALL_LIBDIR}/cmake/moiety)
set(moiety_forms "")
foreach(library ${moiety_libraries})
  set(form static)
  set(headers FILE_SET HEADERS DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
  if(library STREQUAL moiety_shared)
    set(form shared)
    set(headers "")
  endif()
  list(APPEND moiety_forms ${form})
  set_target_properties(${library} PROPERTIES EXPORT_NAME ${form})
  install(TARGETS ${library} EXPORT moiety_${form} ${headers}
          INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
  install(EXPORT moiety_${form} NAMESPACE moiety:: DESTINATION ${package_folder})
endforeach()
if(TARGET moiety_program)
  install(TARGETS moiety_program)
  install(DIRECTORY ${CMAKE_BINARY_DIR}/share/ DESTINATION ${CMAKE_INSTALL_DATADIR} OPTIONAL)
endif()
# What moiety.prepare needs of the Python package, for who has no wheel: PYTHONPATH finds it
# (docs/tokenizers.md#from-python).
foreach(module __init__ errors prepare prepare_errors chat inputs token_file tokenizer tokenizer_identity)
  install(FILES ${CMAKE_SOURCE_DIR}/python/moiety/${module}.py
          DESTINATION ${CMAKE_INSTALL_DATADIR}/moiety/python/moiety)
endforeach()
if(TARGET moiety_mpi)
  install(TARGETS moiety_mpi LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
endif()
# All that an installation holds, without tests and benchmarks.
add_custom_target(installable DEPENDS ${moiety_libraries})
foreach(target moiety_program moiety_mpi)
  if(TARGET ${target})
    add_dependencies(installable ${target})
  endif()
endforeach()
install(FILES LICENSE README.md CHANGELOG.md DESTINATION ${CMAKE_INSTALL_DOCDIR})

configure_package_config_file(cmake/moiety-config.cmake.in ${CMAKE_BINARY_DIR}/moiety-config.cmake
  INSTALL_DESTINATION ${package_folder})
write_basic_package_version_file(${CMAKE_BINARY_DIR}/moiety-config-version.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/moiety-config.cmake ${CMAKE_BINARY_DIR}/moiety-config-version.cmake
        cmake/cudart.cmake cmake/onednn.cmake cmake/tokenizer.cmake DESTINATION ${package_folder})
