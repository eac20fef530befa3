"""`daskcnn doctor`: will a job run here?"""
