"""`bertkit bench`: what each command reaches on this machine, beside other libraries and the limits of the hardware."""
