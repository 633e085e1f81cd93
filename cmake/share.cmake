# Writes what the program says about itself, where an installation has it below share/:
#   cmake -DPROGRAM=... -DFOLDER=... -P cmake/share.cmake
function(write_of path)
  get_filename_component(folder ${FOLDER}/${path} DIRECTORY)
  file(MAKE_DIRECTORY ${folder})
  execute_process(COMMAND ${PROGRAM} ${ARGN} OUTPUT_FILE ${FOLDER}/${path} COMMAND_ERROR_IS_FATAL ANY)
endfunction()
write_of(bash-completion/completions/moiety completion bash)
write_of(zsh/site-functions/_moiety completion zsh)
write_of(fish/vendor_completions.d/moiety.fish completion fish)
write_of(man/man1/moiety.1 man)
