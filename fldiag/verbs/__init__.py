"""One module a verb of the command line: reads, calls the library, draws, says where the result is."""
