# pybind11 is headers: those of the Python package, of torch (which carries a copy, for machines without a network), or the system's.
include(${CMAKE_CURRENT_LIST_DIR}/headers.cmake)
execute_process(
  COMMAND ${Python_EXECUTABLE} -c "
import importlib.util, os
for name in ('pybind11', 'torch'):
    spec = importlib.util.find_spec(name)
    for folder in (spec and spec.submodule_search_locations) or ():
        print(os.path.join(folder, 'include'))"
  OUTPUT_VARIABLE hints OUTPUT_STRIP_TRAILING_WHITESPACE)
string(REPLACE "\n" ";" hints "${hints}")
find_path(NEEDLE_PYBIND11 pybind11/pybind11.h HINTS ${hints} NO_CACHE)
if(NOT NEEDLE_PYBIND11)
  message(FATAL_ERROR "needle: ${Python_EXECUTABLE} has no pybind11 (pip install pybind11)")
endif()
message(STATUS "needle: bindings by pybind11 (${NEEDLE_PYBIND11})")
needle_copy_headers(${NEEDLE_PYBIND11}/pybind11 ${PROJECT_BINARY_DIR}/include/pybind11)
