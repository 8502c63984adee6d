"""Episodes whose server dies: real servers, killed by SIGKILL, and what their clients see."""
