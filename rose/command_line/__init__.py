"""Parts that the command lines of all processes share: parser, output, examples."""
