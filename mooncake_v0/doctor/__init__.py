"""What is wrong on a host, one function per check. `mooncake-v0 doctor` runs them; nothing here prints.

report     Outcome, the registry of checks, running them
host       what the checks may look at: environment, /proc and /sys, installed packages, child processes
software, environment, hardware, network, metadata_state   the checks, in the documented order of troubleshooting
peer       the other host's answering side, for the firewall check in both directions
"""
