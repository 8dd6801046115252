from fldiag.cli import main

main()
