# OpenBLAS comes from the wheel scipy-openblas32: a shared library whose symbols carry the prefix scipy_. An isolated
# build throws the wheel away afterwards, so the library and its licence are copied beside the module that uses it.
include(${CMAKE_CURRENT_LIST_DIR}/headers.cmake)
set(openblas_root "")
if(NEEDLE_OPENBLAS)
  execute_process(
    COMMAND ${Python_EXECUTABLE} -c
            "import scipy_openblas32 as o; print(o.get_lib_dir() + '/' + o.get_library(True), o.get_include_dir(), sep=';')"
    OUTPUT_VARIABLE openblas_paths OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  if(openblas_paths)
    list(GET openblas_paths 0 openblas_library)
    list(GET openblas_paths 1 openblas_include)
    get_filename_component(openblas_root ${openblas_include}/../.. ABSOLUTE)
    needle_copy_headers(${openblas_include} ${PROJECT_BINARY_DIR}/include/openblas)
    message(STATUS "needle: matrix products through OpenBLAS (${openblas_library})")
  endif()
endif()
if(NOT openblas_root)
  message(STATUS "needle: OpenBLAS is not used, matrix products run on needle's own kernel "
                 "(pip install scipy-openblas32 for the faster library)")
endif()

# For the module `name`, whose objects call it.
function(needle_use_openblas name objects)
  if(NOT openblas_root)
    return()
  endif()
  get_filename_component(file ${openblas_library} NAME)
  file(GLOB licence ${openblas_root}/scipy_openblas32-*.dist-info/licenses/LICENSE.txt
       ${openblas_root}/scipy_openblas32-*.dist-info/LICENSE.txt)
  target_include_directories(${objects} SYSTEM PRIVATE ${PROJECT_BINARY_DIR}/include/openblas)
  target_compile_definitions(${objects} PRIVATE NEEDLE_OPENBLAS=1)
  target_link_libraries(${name} PRIVATE ${openblas_library})
  add_custom_command(TARGET ${name} POST_BUILD COMMAND ${CMAKE_COMMAND} -E copy_if_different ${openblas_library}
                     ${NEEDLE_OUTPUT_DIR}/${file} VERBATIM)
  install(FILES ${openblas_library} DESTINATION needle/backend_ndarray)
  if(licence)
    list(GET licence 0 licence)
    add_custom_command(TARGET ${name} POST_BUILD COMMAND ${CMAKE_COMMAND} -E copy_if_different ${licence}
                       ${NEEDLE_OUTPUT_DIR}/LICENSE.openblas.txt VERBATIM)
    install(FILES ${licence} DESTINATION needle/backend_ndarray RENAME LICENSE.openblas.txt)
  endif()
endfunction()
