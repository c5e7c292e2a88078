// Not run: the artifacts of this example were not reachable where it was written; not compiled either. Written from the library's published documentation.
package demo;

import org.springframework.boot.SpringApplication;
import org.springframework.boot.autoconfigure.SpringBootApplication;

@SpringBootApplication
public class DemoApplication {
    public static void main(String[] arguments) {
        SpringApplication.run(DemoApplication.class, arguments);
    }
}
