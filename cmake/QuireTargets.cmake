# The library target and the flags that every target shares.

# #include <quire/cache/ledger.h> everywhere: one symlink per folder in the build tree.
set(QUIRE_INCLUDE_DIR "${PROJECT_BINARY_DIR}/include")
file(MAKE_DIRECTORY "${QUIRE_INCLUDE_DIR}/quire")
foreach(folder cache planner kernels runtime)
  file(CREATE_LINK "${PROJECT_SOURCE_DIR}/${folder}" "${QUIRE_INCLUDE_DIR}/quire/${folder}" SYMBOLIC)
endforeach()

add_library(quire_flags INTERFACE)
target_compile_options(quire_flags INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wconversion -Wsign-conversion -Wshadow -Werror>
  # g++ 13 takes the vector of batch rows for what prepare() returns a reference into.
  $<$<COMPILE_LANGUAGE:CXX>:-Wno-dangling-reference>
  # Host sources are the exact oracle of every GPU test: nothing may be contracted or reordered.
  # (No traps are expected either; that changes no value, and lets loops with selections vectorise.)
  $<$<COMPILE_LANGUAGE:CXX>:-ffp-contract=off -fno-fast-math -fno-trapping-math>)
if(QUIRE_SANITIZE)
  target_compile_options(quire_flags INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=address,undefined -fno-sanitize-recover=all>)
  target_link_options(quire_flags INTERFACE -fsanitize=address,undefined)
endif()
if(QUIRE_CUDA)
  target_compile_options(quire_flags INTERFACE
    "$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra,-Werror,-ffp-contract=off;-Werror=all-warnings>"
    $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr;--extended-lambda;-lineinfo>)
endif()

# SPEC 3.7: last on the line of every source that stores bytes.
set(QUIRE_EXACT_CUDA_FLAGS "-fmad=false;-ftz=false;-prec-div=true;-prec-sqrt=true")

function(quire_library)
  file(GLOB sources CONFIGURE_DEPENDS
    cache/*.cpp runtime/*.cpp runtime/base/*.cpp runtime/host/*.cpp kernels/host/*.cpp)
  add_library(quire STATIC ${sources})
  add_library(quire::quire ALIAS quire)
  target_compile_features(quire PUBLIC cxx_std_20)
  target_include_directories(quire PUBLIC
    "$<BUILD_INTERFACE:${QUIRE_INCLUDE_DIR}>" $<INSTALL_INTERFACE:include>)
  # nlohmann_json is headers only and shows in no header of ours: who links quire needs none of it.
  target_link_libraries(quire PUBLIC Threads::Threads PRIVATE $<BUILD_INTERFACE:quire_flags>
    spdlog::spdlog $<BUILD_INTERFACE:nlohmann_json::nlohmann_json>)
  if(QUIRE_CUDA)
    file(GLOB cuda_sources CONFIGURE_DEPENDS
      kernels/*.cu planner/*.cu runtime/cuda/*.cu runtime/cuda/*.cpp)
    target_sources(quire PRIVATE ${cuda_sources})
    file(GLOB exact_sources CONFIGURE_DEPENDS kernels/*.cu planner/*.cu)
    set_source_files_properties(${exact_sources} PROPERTIES COMPILE_OPTIONS
      "${QUIRE_EXACT_CUDA_FLAGS}")
    target_link_libraries(quire PRIVATE CUDA::cudart_static)
    target_compile_definitions(quire PRIVATE QUIRE_WITH_CUDA=1)
  endif()
endfunction()
