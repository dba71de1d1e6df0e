"""What an operator needs to set two clusters up: `leeway deploy credentials` and `check`."""
