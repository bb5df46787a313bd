# The CUDA backend, twice: by nvcc for GPUs, and by the C++ compiler against the emulator (cuda_sim).
file(GLOB cuda_kernels CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/kernels/*_cuda.cu)
# The module itself is host code, for the C++ compiler in both cases: nvcc would read the bindings once per architecture.
set(cuda_module ${PROJECT_SOURCE_DIR}/src/ndarray_backend_cuda.cc ${PROJECT_SOURCE_DIR}/src/common/cublaslt.cc)
set_source_files_properties(${cuda_module} PROPERTIES COMPILE_OPTIONS "${light};-fno-sanitize=all")  # instrumenting takes long

# CMake looks for nvcc on PATH alone, where the toolkit's installer does not put it.
set(nvcc_folders "$ENV{CUDA_HOME}/bin" "$ENV{CUDA_PATH}/bin" /usr/local/cuda/bin)

# Compiling for GPUs takes minutes: without being asked to, only where there is one. A container may have the fourth alone.
file(GLOB gpus /dev/nvidia[0-9]* /dev/dxg)
if(NEEDLE_CUDA STREQUAL "AUTO" AND NOT gpus)
  message(STATUS "needle: no GPU here, the CUDA backend is not built (NEEDLE_CUDA=ON builds it all the same)")
  set(NEEDLE_CUDA OFF)
endif()
if(NEEDLE_CUDA)  # neither OFF nor 0, FALSE, no
  # Set before enable_language, which would otherwise choose an architecture of its own.
  set(CMAKE_CUDA_ARCHITECTURES ${NEEDLE_CUDA_ARCHITECTURES})
  if(NOT CMAKE_CUDA_COMPILER AND "$ENV{CUDACXX}" STREQUAL "")
    find_program(NEEDLE_NVCC nvcc PATHS ${nvcc_folders})
    if(NEEDLE_NVCC)
      set(ENV{CUDACXX} "${NEEDLE_NVCC}")
    endif()
    unset(NEEDLE_NVCC CACHE)
  endif()
  if(NEEDLE_CUDA STREQUAL "AUTO")
    include(CheckLanguage)
    set(ENV{CUDAARCHS} "${NEEDLE_CUDA_ARCHITECTURES}")  # which an old compiler does not know
    if(NOT CMAKE_CUDA_COMPILER)
      unset(CMAKE_CUDA_COMPILER CACHE)  # what an earlier look found wanting is looked for again
    endif()
    check_language(CUDA)  # keeps to itself what is wrong with a compiler: one that does not take the host's, often
  endif()
  if(CMAKE_CUDA_COMPILER OR NOT NEEDLE_CUDA STREQUAL "AUTO")
    enable_language(CUDA)
    # -O1 is for the host's part, which launches; kernels are compiled at -O3 regardless. -lineinfo: tools name their lines.
    set(CMAKE_CUDA_FLAGS_RELEASE "-O1 -DNDEBUG")
    if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 13.0)
      string(APPEND CMAKE_CUDA_FLAGS_RELEASE " --compress-mode=size")  # a sixth of the size that the default leaves
    endif()
    set(CMAKE_CUDA_FLAGS_RELWITHDEBINFO "${CMAKE_CUDA_FLAGS_RELEASE} -lineinfo")
    set(CMAKE_CUDA_STANDARD 17)
    set(CMAKE_CUDA_STANDARD_REQUIRED ON)
    needle_module(ndarray_backend_cuda cuda ${cuda_module} ${cuda_kernels})
    target_compile_definitions(ndarray_backend_cuda_objects PUBLIC NEEDLE_GPU=1)
    target_include_directories(ndarray_backend_cuda_objects SYSTEM PUBLIC ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
    # The runtime is linked statically: the module imports on a machine without CUDA and then finds no device.
    set_target_properties(ndarray_backend_cuda ndarray_backend_cuda_objects PROPERTIES
                          CUDA_RUNTIME_LIBRARY Static CUDA_VISIBILITY_PRESET hidden)
    target_compile_options(ndarray_backend_cuda_objects PRIVATE
      $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr -Xcompiler=-Wall>)
    message(STATUS "needle: CUDA backend by ${CMAKE_CUDA_COMPILER} for ${NEEDLE_CUDA_ARCHITECTURES}")
  else()
    message(STATUS "needle: no CUDA compiler that works, the CUDA backend is not built (NEEDLE_CUDA=ON says why)")
  endif()
endif()

if(NEEDLE_CUDA_SIM)
  file(GLOB sim_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/common/cuda_sim/*.cc)
  # A source has one language per directory, and these .cu files may be nvcc's already: a .cc that includes the .cu
  # lets both targets stand in one build.
  set(sim_wrappers "")
  foreach(source ${cuda_kernels})
    get_filename_component(stem ${source} NAME_WE)
    set(wrapper ${CMAKE_CURRENT_BINARY_DIR}/cuda_sim/${stem}.cc)
    file(CONFIGURE OUTPUT ${wrapper} CONTENT "#include \"${source}\"\n")
    list(APPEND sim_wrappers ${wrapper})
  endforeach()
  needle_module(ndarray_backend_cuda_sim cuda_sim ${cuda_module} ${sim_wrappers} ${sim_sources})
  needle_host_flags(ndarray_backend_cuda_sim)
  if(NEEDLE_PTX)
    find_program(NEEDLE_NVCC nvcc PATHS ${nvcc_folders})
    if(NOT NEEDLE_NVCC)
      message(FATAL_ERROR "needle: NEEDLE_PTX needs nvcc, which is neither on PATH nor in CUDA_HOME/bin")
    elseif(NOT NEEDLE_PTX MATCHES "^[0-9]+$" OR NEEDLE_RACE OR NEEDLE_SANITIZE)
      message(FATAL_ERROR "needle: NEEDLE_PTX is ${NEEDLE_PTX} (accepted: 75, 80, 90, without NEEDLE_RACE and NEEDLE_SANITIZE)")
    endif()
    set(translate ${PROJECT_SOURCE_DIR}/src/common/cuda_sim/ptx/translate.py)
    # The namespace of the emulator's device gives the kernels the names that they have there.
    set(ptx_flags -std=c++17 -O3 -DNDEBUG -DNEEDLE_DEVICE=cuda_sim --expt-relaxed-constexpr)
    if(only_dtypes)
      list(APPEND ptx_flags -D${only_dtypes})
    endif()
    foreach(source ${cuda_kernels})
      get_filename_component(stem ${source} NAME_WE)
      set(ptx ${CMAKE_CURRENT_BINARY_DIR}/ptx/${stem}.ptx)
      add_custom_command(
        OUTPUT ${ptx}
        COMMAND ${NEEDLE_NVCC} ${ptx_flags} -I${PROJECT_SOURCE_DIR}/src -I${PROJECT_SOURCE_DIR}/src/common
                -arch=compute_${NEEDLE_PTX} -ptx ${source} -o ${ptx} -MD -MF ${ptx}.d
        DEPENDS ${source} DEPFILE ${ptx}.d VERBATIM)
      add_custom_command(OUTPUT ${ptx}.cc COMMAND ${Python_EXECUTABLE} ${translate} ${ptx} ${ptx}.cc
                         DEPENDS ${ptx} ${translate} VERBATIM)
      list(APPEND translated ${ptx}.cc)
    endforeach()
    file(MAKE_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/ptx)
    target_sources(ndarray_backend_cuda_sim_objects PRIVATE ${translated} ${PROJECT_SOURCE_DIR}/src/common/cuda_sim/ptx/kernels.cc)
    target_include_directories(ndarray_backend_cuda_sim_objects PRIVATE ${PROJECT_SOURCE_DIR}/src/common)
    target_compile_definitions(ndarray_backend_cuda_sim_objects PUBLIC NEEDLE_PTX=1)
    # Each instruction is rounded by itself.
    set_source_files_properties(${translated} PROPERTIES COMPILE_OPTIONS "${light};-g0;-ffp-contract=off")
  endif()
  # There are hundreds of kernels and each gets little work here: they are light, too, and -g1 gives the source line of a fault.
  set(sim_options "${light};$<$<NOT:$<CONFIG:Debug>>:-g1>")
  if(NEEDLE_RACE)
    # The kernels' memory accesses call the emulator's __tsan_* hooks; libtsan itself is not linked.
    list(APPEND sim_options -fsanitize=thread -fno-tree-loop-distribute-patterns)
    target_compile_definitions(ndarray_backend_cuda_sim_objects PUBLIC NEEDLE_RACE=1)
  endif()
  set_source_files_properties(${sim_wrappers} PROPERTIES COMPILE_OPTIONS "${sim_options}")
endif()
