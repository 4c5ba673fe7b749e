# Compiles PTX for sm_90 with the flags of the library, and keeps what ptxas says about each kernel.
# In the working directory, where it leaves the code as well:
#   cmake -DNVCC=... -DFLAGS=list -DPTX_LIST=file of paths -DLOG=file -P run_ptxas.cmake
file(STRINGS "${PTX_LIST}" ptx_files)
execute_process(
  COMMAND "${NVCC}" -cubin -arch=sm_90 -lineinfo ${FLAGS} -Xptxas=-v ${ptx_files}
  RESULT_VARIABLE result OUTPUT_VARIABLE log ERROR_VARIABLE log)
if(NOT result EQUAL 0)
  message(FATAL_ERROR "${log}")
endif()
file(WRITE "${LOG}" "${log}")
