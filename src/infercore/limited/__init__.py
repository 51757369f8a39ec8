"""Work that untrusted input may blow up, in a child process with limits on time and memory."""
