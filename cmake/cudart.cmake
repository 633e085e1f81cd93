# Finds the static CUDA run time, for this build (cmake/cuda.cmake) and for users of the static library
# (moiety-config.cmake), in the folders of moiety_cudart_hints, then where toolkits are installed. Sets
# MOIETY_CUDART and the target moiety::cudart. CMake's own module makes a target of each library of a
# toolkit, and ends the configuration over ones that nobody asked for.
find_library(MOIETY_CUDART cudart_static HINTS ${moiety_cudart_hints} PATHS /usr/local/cuda/lib64)
if(MOIETY_CUDART AND NOT TARGET moiety::cudart)
  add_library(moiety::cudart STATIC IMPORTED)
  set_target_properties(moiety::cudart PROPERTIES
    IMPORTED_LOCATION ${MOIETY_CUDART} INTERFACE_LINK_LIBRARIES "Threads::Threads;${CMAKE_DL_LIBS};rt")
endif()
