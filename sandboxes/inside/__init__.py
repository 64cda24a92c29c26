"""The sandbox's side of the wall: all the code of pid 1 and the program, and all that is sent into a container."""
