# Finds oneDNN's header and library, for this build (cmake/dependencies.cmake) and for users of the
# static library (moiety-config.cmake). Sets moiety_onednn, moiety_onednn_version, and the target
# moiety::onednn.
find_path(MOIETY_ONEDNN_INCLUDE oneapi/dnnl/dnnl.hpp)
find_library(MOIETY_ONEDNN_LIBRARY dnnl)
set(moiety_onednn FALSE)
set(moiety_onednn_version "")
if(MOIETY_ONEDNN_INCLUDE AND MOIETY_ONEDNN_LIBRARY)
  file(STRINGS ${MOIETY_ONEDNN_INCLUDE}/oneapi/dnnl/dnnl_version.h lines REGEX "define DNNL_VERSION_[MP][A-Z]+ +[0-9]")
  foreach(line ${lines})
    string(REGEX MATCH "[0-9]+$" number "${line}")
    list(APPEND moiety_onednn_version ${number})
  endforeach()
  list(JOIN moiety_onednn_version "." moiety_onednn_version)
  if(NOT moiety_onednn_version VERSION_LESS 2.6)
    set(moiety_onednn TRUE)
    if(NOT TARGET moiety::onednn)
      add_library(moiety::onednn UNKNOWN IMPORTED)
      set_target_properties(moiety::onednn PROPERTIES
        IMPORTED_LOCATION ${MOIETY_ONEDNN_LIBRARY} INTERFACE_INCLUDE_DIRECTORIES ${MOIETY_ONEDNN_INCLUDE})
    endif()
  endif()
endif()
